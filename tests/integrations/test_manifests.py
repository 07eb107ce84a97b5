"""Manifests of `roseinfer deploy --print`."""

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from roseinfer.cli import main as cli
from roseinfer.cli.commands import deploy, serve
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.integrations import manifests
from roseinfer.integrations.ray import plan
from tests.integrations.schemas import BY_KIND, SERVE_CONFIG

IMAGES = Path(__file__).parents[2] / "deploy" / "docker"
RUN = ("some/model", "--shutdown-timeout", "40.5", "--port", "9000", "--kv-offloading-size", "2.5")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    def documents(kind: str, *options: str) -> dict[str, Any]:
        """Return the documents that the command writes, by their kind."""
        assert cli.main(["deploy", "--print", kind, *options]) == 0
        return {document["kind"]: document for document in yaml.safe_load_all(capsys.readouterr().out)}

    return documents


def pods(documents: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of all pods."""
    found = [documents["Deployment"]["spec"]["template"]] if "Deployment" in documents else []
    if "RayService" in documents:
        cluster = documents["RayService"]["spec"]["rayClusterConfig"]
        found += [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return found


EVERY = pytest.mark.parametrize("kind", plan.MANIFEST_KINDS)


@EVERY
@pytest.mark.parametrize("more", [(), ("--engines", "3", "--device", "cpu")], ids=("one", "several"))
def test_manifests_match_the_schemas(printed: Any, kind: str, more: tuple[str, ...]) -> None:
    documents = printed(kind, *RUN, *more)
    assert documents
    for name, document in documents.items():
        jsonschema.validate(document, BY_KIND[name])


def test_the_schemas_reject_unknown_fields_and_wrong_values(printed: Any) -> None:
    document = printed("inferencepool")["InferencePool"]
    picker = document["spec"]["endpointPickerRef"]
    for change in ({"portNumber": 9002}, {"port": {"number": 0}}, {"failureMode": "FailSoft"}):
        wrong = document | {"spec": document["spec"] | {"endpointPickerRef": picker | change}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, BY_KIND["InferencePool"])


OPTION_SETS = {
    "one": RUN,
    "several": ("--engines", "2", "--device", "cpu", "--threads", "3"),
    "shared": ("-tp", "4", "--engines", "2", "--image", "registry:5000/team/x@sha256:0"),
    "named": ("--served-model-name", "a", "--served-model-name", "b", "--kv-events-endpoint", "tcp://0.0.0.0:5557"),
}


@EVERY
@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
def test_kubernetes_own_schemas_accept_the_manifests(printed: Any, kind: str, options: tuple[str, ...]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="no schemas of Kubernetes are installed")
    if kind == plan.RAY_SERVICE:
        options = (*options, "--max-engines", "5", "--api-replicas", "3")
    documents = printed(kind, *options)
    known = [document for name, document in documents.items() if name not in ("RayService", "InferencePool")]
    known += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **pod} for pod in pods(documents)]
    for document in known:
        validate.validate(document, validate.latest_version(), strict=True)


def test_ports_of_ray_are_accepted_without_ray(printed: Any) -> None:
    (container,) = pods(printed("k8s", "--port", "8080"))[0]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]


def test_the_pod_serves_with_the_given_options(printed: Any) -> None:
    documents = printed("k8s", *RUN, "--engines", "2", "--served-model-name", "a", "--served-model-name", "b")
    spec = documents["Deployment"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    parser = OptionParser(prog="roseinfer serve")
    serve.OPTIONS.add_to(parser)
    given = serve.OPTIONS.read(parser.parse_args(container["args"]))
    server = serve.OPTIONS.build(ServerConfig, given)
    assert serve.OPTIONS.build(ModelConfig, given).model == "some/model"
    assert (server.port, server.shutdown_timeout, server.served_model_name) == (9000, 40.5, ("a", "b"))
    assert spec["replicas"] == 2 and container["ports"] == [{"name": "http", "containerPort": 9000}]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > server.shutdown_timeout + 10
    assert container["resources"]["limits"] == {"memory": "19Gi", "nvidia.com/gpu": "1"}
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}


def test_services_and_pools_select_the_pods(printed: Any) -> None:
    documents = printed("k8s", *RUN) | printed("inferencepool", *RUN)
    template = documents["Deployment"]["spec"]["template"]
    labels, (container,) = template["metadata"]["labels"], template["spec"]["containers"]
    pool = documents["InferencePool"]["spec"]
    for selector in (
        documents["Deployment"]["spec"]["selector"]["matchLabels"],
        documents["Service"]["spec"]["selector"],
        pool["selector"]["matchLabels"],
    ):
        assert selector and selector.items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == "vllm" and pool["targetPorts"] == [{"number": 9000}]
    assert documents["Service"]["spec"]["ports"][0]["targetPort"] in [port["name"] for port in container["ports"]]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "9000"


@pytest.mark.parametrize("kind", ["k8s", "rayservice"])
def test_pods_mount_their_volumes_and_read_keys_from_a_secret(
    printed: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSEINFER_API_KEY", "sesame")
    documents = printed(kind, *RUN)
    assert "sesame" not in str(documents)
    claim = documents["PersistentVolumeClaim"]["metadata"]["name"]
    for pod in pods(documents):
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim
        assert container["envFrom"] == [{"secretRef": {"name": "roseinfer-keys"}}]


def test_a_pod_has_a_gpu_for_each_rank_of_its_engine(printed: Any) -> None:
    for kind in ("k8s", "rayservice"):
        (container,) = pods(printed(kind, "-tp", "4"))[-1]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert int(container["resources"]["requests"]["cpu"]) >= 5, "a core for each GPU, and one for the API"


def test_the_image_depends_on_the_device_unless_one_is_given(printed: Any) -> None:
    (container,) = pods(printed("k8s", "--device", "cpu"))[0]["spec"]["containers"]
    assert container["image"] == "roseinfer:cpu" and "nvidia.com/gpu" not in container["resources"]["limits"]
    (container,) = pods(printed("k8s", "--image", "registry/x:1"))[0]["spec"]["containers"]
    assert container["image"] == "registry/x:1" and container["args"] == []


def test_the_application_on_ray_gets_the_same_options(printed: Any) -> None:
    spec = printed("rayservice", *RUN, "--engines", "2", "--max-engines", "4", "--served-model-name", "a")["RayService"]
    config = yaml.safe_load(spec["spec"]["serveConfigV2"])
    jsonschema.validate(config, SERVE_CONFIG)
    (application,) = config["applications"]
    given = deploy.OPTIONS.read_values(application["args"], "args")
    assert given["served_model_name"] == ("a",) and given["kv_offloading_size"] == 2.5
    assert deploy.OPTIONS.build(plan.DeployConfig, given) == plan.DeployConfig(engines=2, max_engines=4, bind="0.0.0.0")
    assert given["device"] == "cuda" and config["http_options"] == {"host": "0.0.0.0", "port": 9000}
    module, _, name = application["import_path"].partition(":")
    assert module == "roseinfer.integrations.ray", "users' config files contain this name"
    with pytest.raises(ConfigError, match=r"args: unknown option 'engine_count'"):
        getattr(import_module(module), name)({"engine_count": 2})


def test_a_ray_cluster_is_autoscaled_and_requires_a_token(printed: Any) -> None:
    for more, autoscaled in ((("--max-engines", "4"), True), ((), False)):
        cluster = printed("rayservice", *more)["RayService"]["spec"]["rayClusterConfig"]
        (group,) = cluster["workerGroupSpecs"]
        assert cluster["authOptions"] == {"mode": "token"} and cluster["enableInTreeAutoscaling"] is autoscaled
        assert (group["minReplicas"], group["maxReplicas"]) == (1, 4 if autoscaled else 1)
        assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
        head = cluster["headGroupSpec"]["template"]["spec"]
        assert head["automountServiceAccountToken"] is autoscaled, "the autoscaler requests pods"
        assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]


def test_the_head_stores_its_state_in_redis(printed: Any) -> None:
    """The loss of the head would end all engines otherwise."""
    documents = printed("rayservice")
    redis, service = documents["StatefulSet"]["spec"], documents["Service"]
    options = documents["RayService"]["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == f"redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["selector"] == redis["template"]["metadata"]["labels"]
    (container,) = redis["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert container["args"][-2:] == ["--requirepass", f"$({variable['name']})"]
    assert options["redisPassword"]["valueFrom"] == variable["valueFrom"], "the password is the same Secret's"
    (claim,) = redis["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == container["volumeMounts"][0]["name"]


def test_pods_of_engines_are_spread_over_nodes(printed: Any) -> None:
    """KubeRay adds the label of the group; the head has none."""
    (server,) = pods(printed("k8s", "--engines", "2"))
    head, engine = pods(printed("rayservice", "--engines", "2"))
    for pod, labels in ((server, server["metadata"]["labels"]), (engine, {"ray.io/group": "engines"})):
        (rule,) = pod["spec"]["topologySpreadConstraints"]
        assert rule["whenUnsatisfiable"] == "ScheduleAnyway", "an engine beside another is better than none"
        assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    assert "topologySpreadConstraints" not in head["spec"]


def test_paths_of_haproxy_match_the_images(printed: Any) -> None:
    for pod in pods(printed("rayservice")):
        variables = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
        assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert variables["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "0.5"
        assert (
            variables["RAY_SERVE_HAPROXY_BINARY_PATH"]
            == f"{manifests.SITE_PACKAGES}/roseinfer/integrations/ray/haproxy"
        )
        assert variables["ROSEINFER_HAPROXY"].startswith(manifests.SITE_PACKAGES)
    for dockerfile in IMAGES.glob("*.Dockerfile"):
        text = dockerfile.read_text()
        assert "ARG PYTHON=3.11\n" in text and "-m venv /opt/roseinfer\n" in text, "as SITE_PACKAGES says"
        assert f"--uid {manifests.USER_ID} " in text


def test_pods_of_ray_have_probes_by_http(printed: Any) -> None:
    """KubeRay's own probes run wget, which the images lack, so pods would never be ready."""
    head, worker = (pod["spec"]["containers"][0] for pod in pods(printed("rayservice", *RUN)))
    node = {"path": "/api/healthz", "port": 52365}
    assert [head["readinessProbe"]["httpGet"], head["livenessProbe"]["httpGet"]] == [node, node]
    assert worker["livenessProbe"]["httpGet"] == node
    assert worker["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    assert {"name": "serve", "containerPort": 9000} in worker["ports"]
    for dockerfile in IMAGES.glob("*.Dockerfile"):
        assert "wget" not in dockerfile.read_text()


def test_the_version_of_ray_is_the_supported_one() -> None:
    cluster = import_module("roseinfer.integrations.ray.cluster")
    assert manifests.RAY_VERSION.startswith(f"{cluster.RAY_SERIES}.")
    if importlib.util.find_spec("ray") is not None:
        import ray

        assert ray.__version__.startswith(f"{cluster.RAY_SERIES}.")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("k8s", "--api-key", "k"), "--api-key: manifests contain no keys; put them into the Secret roseinfer-keys"),
        (("rayservice", "--api-key-file", "f"), "--api-key-file: manifests contain no keys"),
        (("k8s", "--max-engines", "2"), "--max-engines cannot be used with --print k8s"),
        (("inferencepool", "--api-replicas", "2"), "--api-replicas cannot be used with --print inferencepool"),
        (("rayservice", "--address", "a:1"), "--address cannot be used with --print rayservice"),
        (("rayservice", "--bind", "127.0.0.1"), "--bind cannot be used with --print rayservice"),
        (("k8s", "--down"), "--down cannot be used with --print"),
        (("rayservice", "--port", "8265"), "--port: 8265 is in use in the pods of a Ray cluster, by Ray's dashboard"),
        (("rayservice", "--port", "30500"), "--port: 30500 is in use in the pods of a Ray cluster, by API processes"),
        (("rayservice", "--port", "7150"), "--port: 7150 is one of --engine-ports, 7100-7199"),
        (("helm",), "invalid choice: 'helm'"),
    ],
)
def test_unsupported_options_are_reported_in_one_line(
    options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert cli.main(["deploy", "--print", *options]) == 2
    except SystemExit as error:
        assert error.code == 2
    output = capsys.readouterr()
    assert says in output.err.splitlines()[-1] and not output.out
