"""Images, the unit of systemd and the manifest in `deploy/` match the server that they start."""

import configparser
import fnmatch
import json
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

from roseinfer.cli.commands import serve
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.config.server import ServerConfig
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_level

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
USER = "10001"
# In addition to --shutdown-timeout: closing streams and ending the engines.
SHUTDOWN_MARGIN_S = 10


def served(arguments: list[str]) -> tuple[str, ServerConfig]:
    """Return the model and the options of a command to serve. Raise an error if they are invalid."""
    parser = OptionParser(prog="roseinfer serve")
    serve.OPTIONS.add_to(parser)
    given = serve.OPTIONS.read(parser.parse_args(arguments))
    return serve.OPTIONS.build(ModelConfig, given).model, serve.OPTIONS.build(ServerConfig, given)


def rehearse() -> Any:
    spec = spec_from_file_location("rehearse", DEPLOY / "docker" / "rehearse.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["rehearse"] = module
    spec.loader.exec_module(module)
    return module


# --- images ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_copies_existing_files_and_runs_unprivileged(dockerfile: Path):
    steps = list(rehearse().steps(dockerfile.read_text()))
    last = max(step.stage for step in steps)
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for step in steps:
        if step.name == "COPY" and not step.rest.startswith("--from"):
            for source in step.rest.split()[:-1]:
                assert (REPOSITORY / source).exists() and f"!{source}" in ignored
    users = [step.rest for step in steps if step.name == "USER" and step.stage == last]
    assert users == [f"{USER}:{USER}"], "a number, by which Kubernetes can check that it is not root"
    (entry,) = [json.loads(step.rest) for step in steps if step.name == "ENTRYPOINT"]
    assert entry[:2] == ["roseinfer", "serve"]
    model, config = served([*entry[2:], "some/model", "--port", "9000"])
    assert (model, config.host, config.port) == ("some/model", "0.0.0.0", 9000)
    (check,) = [step.rest for step in steps if step.name == "HEALTHCHECK"]
    (port,) = [step.rest for step in steps if step.name == "EXPOSE"]
    assert f"http://127.0.0.1:{port}/health'" in check and f'"--port", "{port}"' in json.dumps(entry)


def test_the_health_check_passes_and_fails_with_the_server(tmp_path: Path):
    steps = rehearse().steps(DOCKERFILES[0].read_text())
    (check,) = [json.loads(step.rest.partition("CMD ")[2]) for step in steps if step.name == "HEALTHCHECK"]

    def status(port: int) -> int:
        command = [sys.executable, *(word.replace("8000", str(port)) for word in check[1:])]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=20).returncode

    with LiveServer(byte_level()) as server:
        assert status(server.port) == 0
        server.engine.alive = False
        assert status(server.port) != 0


def test_steps_of_a_dockerfile():
    text = "ARG A=1\n# note\nFROM x AS y\nRUN a && \\\n    # aside\n    b\n\nFROM z\nCOPY --from=y /p /q\n"
    assert list(rehearse().steps(text)) == [
        (-1, "ARG", "A=1"),
        (0, "FROM", "x AS y"),
        (0, "RUN", "a &&      b"),
        (1, "FROM", "z"),
        (1, "COPY", "--from=y /p /q"),
    ]


def test_paths_of_an_image_are_found_in_its_commands(tmp_path: Path):
    made = rehearse().Rehearsal(DOCKERFILES[0], tmp_path, {})
    text = made.relocated("/opt/roseinfer/bin/pip install '/src[otel]' --index-url https://host/opt/x")
    assert text == f"{tmp_path}/opt/roseinfer/bin/pip install '{tmp_path}/src[otel]' --index-url https://host/opt/x"


# --- systemd --------------------------------------------------------------------------------------------------------
UNIT = DEPLOY / "systemd" / "roseinfer.service"


def test_the_unit_starts_reloads_and_stops_the_server(tmp_path: Path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert (service["Type"], service["KillMode"]) == ("notify", "mixed")
    assert service["ExecReload"].endswith("kill -HUP $MAINPID")
    assert float(service["TimeoutStopSec"]) > ServerConfig().shutdown_timeout + SHUTDOWN_MARGIN_S
    options = tmp_path / "serve.toml"
    options.write_text('model = "tiny"\nport = 8123\n')
    program, *arguments = service["ExecStart"].split()
    assert Path(program).name == "roseinfer"
    assert arguments[0] == "serve"
    model, config = served([word.replace("/etc/roseinfer/serve.toml", str(options)) for word in arguments[1:]])
    assert (model, config.port) == ("tiny", 8123)


def test_systemd_accepts_the_unit(tmp_path: Path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/roseinfer/bin/roseinfer", sys.executable))
    done = subprocess.run([tool, "verify", str(copy)], capture_output=True, text=True)
    if "Failed to" in done.stderr and "unit file" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()[:200]}")
    assert (done.returncode, done.stderr) == (0, "")


# --- kubernetes -----------------------------------------------------------------------------------------------------
MANIFEST = DEPLOY / "kubernetes" / "roseinfer.yaml"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_server_answers_the_probes_of_the_pod(manifests: dict[str, Any]):
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _, config = served(container["args"])
    (port,) = container["ports"]
    entry = next(step.rest for step in rehearse().steps(DOCKERFILES[0].read_text()) if step.name == "ENTRYPOINT")
    assert str(port["containerPort"]) in json.loads(entry)
    with LiveServer(byte_level()) as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            check = container[probe]["httpGet"]
            assert check["port"] == port["name"] and server.get(check["path"]).status_code == 200
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_timeout + SHUTDOWN_MARGIN_S


def test_the_pod_may_write_only_where_the_server_does(manifests: dict[str, Any]):
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert str(pod["securityContext"]["runAsUser"]) == USER and pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/tmp", "/models", "/dev/shm"} == set(mounts.values())
    for dockerfile in DOCKERFILES:
        for step in rehearse().steps(dockerfile.read_text()):
            for word in step.rest.split() if step.name == "ENV" else ():
                value = word.partition("=")[2]
                if value.startswith("/") and not value.startswith("/opt/"):
                    assert any(fnmatch.fnmatch(value, f"{path}*") for path in mounts.values()), word


def test_the_service_selects_the_pods(manifests: dict[str, Any]):
    deployment, service = manifests["Deployment"]["spec"], manifests["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (deployment["selector"]["matchLabels"], service["selector"]):
        assert selector.items() <= labels.items()
    (container,) = deployment["template"]["spec"]["containers"]
    assert service["ports"][0]["targetPort"] in [port["name"] for port in container["ports"]]
    claims = [volume.get("persistentVolumeClaim", {}) for volume in deployment["template"]["spec"]["volumes"]]
    assert {"claimName": manifests["PersistentVolumeClaim"]["metadata"]["name"]} in claims


def test_kubernetes_own_schemas_accept_the_manifests():
    validate = pytest.importorskip("kubernetes_validate", reason="no schemas of Kubernetes are installed")
    for document in yaml.safe_load_all(MANIFEST.read_text()):
        validate.validate(document, validate.latest_version(), strict=True)
