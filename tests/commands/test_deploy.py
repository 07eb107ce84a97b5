"""What `roseinfer deploy` says before it asks a cluster for anything."""

import importlib.util
from pathlib import Path

import pytest

from roseinfer import cli
from roseinfer.core.errors import ResourceError
from roseinfer.deploy import cluster


@pytest.fixture
def cost(tmp_path: Path) -> Path:
    file = tmp_path / "cost.json"
    file.write_text('{"cost": {"step_s": 0.01, "token_s": 1e-5, "pair_s": 0, "row_s": 1e-5, "context_s": 0}}')
    return file


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--engines", "2", "--min-engines", "3"],
            "--engines: 2 is not between --min-engines (3) and --max-engines (2)",
        ),
        (["--engine-ports", "90-80"], "--engine-ports must be two ports, as 7100-7199, got '90-80'"),
        (["--engine-ports", "many"], "--engine-ports must be two ports"),
        (["--engines", "0"], "--engines must be positive"),
        (["--record", "steps.jsonl"], "--record: engines on Ray write no files"),
        (["--slow", "1,2"], "--slow: engines on Ray are all alike"),
        (["--port", "0"], "--port: all processes of a deployment must know it"),
        (["--api-workers", "2"], "unrecognized arguments: --api-workers"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    options: list[str], says: str, cost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["deploy", "--device", "priced", "--cost", str(cost), *options]
    try:
        assert cli.main(argv) == 2
    except SystemExit as error:
        assert error.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert says in told and told.startswith("roseinfer")


def test_a_missing_extra_is_told_in_one_line(
    cost: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    for argv in (["deploy", "--status"], ["deploy", "--device", "priced", "--cost", str(cost)]):
        assert cli.main(argv) == 1
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "pip install 'roseinfer[ray]'" in told


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.check_disk(str(tmp_path))
    monkeypatch.setattr(cluster, "LEAST_DISK_SHARE", 1.1)
    with pytest.raises(ResourceError, match=r"the disk of .* has only [\d.]+ GiB left: Ray does not work on it"):
        cluster.check_disk(str(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the ray extra is not installed")
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:9", "no Ray cluster at 127.0.0.1:9 (Connection refused); start one with"),
        ("nowhere", "--address: must be HOST:PORT, got 'nowhere'"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_in_one_line(
    address: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["deploy", "--status", "--address", address]) in (1, 2)
    assert says in capsys.readouterr().err.splitlines()[-1]
