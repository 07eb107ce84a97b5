"""A failed start is reported quickly, in one line."""

import asyncio
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from roseinfer import LLM
from roseinfer.cli import main as cli
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ResourceError, UnsupportedModelError
from roseinfer.processes import private_folder
from roseinfer.server import hosting
from roseinfer.server.observe import watchdog
from roseinfer.server.observe.throttle import ThrottledLog
from tests.server.real_server import priced


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model, for a test to spoil its config."""
    with resources.as_file(resources.files("roseinfer") / "assets" / "tiny") as folder:
        return Path(shutil.copytree(folder, tmp_path / "model"))


def told(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that the command ends with."""
    assert cli.main(["serve", "--port", "0", *options]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith(("roseinfer: error: ", "Traceback"))] == lines[-1:]
    return lines[-1]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    def mkdtemp(**options: Any) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(private_folder.tempfile, "mkdtemp", mkdtemp)
    assert "cannot create a temporary folder (No usable temporary" in told(capsys, "--api-workers", workers)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_temporary_folder_with_a_long_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, workers: str
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(long))
    assert "too long for a socket" in told(capsys, "--api-workers", workers)
    assert os.listdir(long) == []


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("vocab_size", 10**12, "vocab_size = 1000000000000 is not supported"),
        ("num_hidden_layers", 10**9, "num_hidden_layers = 1000000000 is not supported"),
        ("num_hidden_layers", 10**6, "1000000 layers are not supported"),
        ("hidden_size", 2**23, "weights, but the checkpoint's files hold"),
        ("intermediate_size", 2**23, "weights, but the checkpoint's files hold"),
        ("max_position_embeddings", 10**15, "max_position_embeddings = 1000000000000000 is not supported"),
        ("head_dim", 10**9, "head_dim = 1000000000 is not supported"),
    ],
)
def test_absurd_sizes(model: Path, field: str, value: int, why: str) -> None:
    set_size(model, field, value)
    with pytest.raises(UnsupportedModelError, match=why):
        LLM(str(model), device="cpu")


def set_size(model: Path, field: str, value: int) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {field: value}))


def test_the_server_tells_of_an_absurd_size_as_its_engine_does(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    set_size(model, "hidden_size", 2**23)
    assert "weights, but the checkpoint's files hold" in told(capsys, str(model), "--api-workers", "1")


def test_a_config_that_is_nested_without_end(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text("[" * 100_000)
    assert "config.json: nested too deeply" in told(capsys, str(model), "--api-workers", "1")


def test_few_descriptors() -> None:
    script = (
        "import resource, sys; from roseinfer.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); sys.exit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "roseinfer: error: the limit on open files is 40 (ulimit -n), at least 128 are needed\n"


def test_the_limit_on_descriptors_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = [256, 2000]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: limit.__setitem__(slice(None), limits))
    hosting.claim_descriptors(ServerConfig())
    assert limit == [2000, 2000] and caplog.records == []
    hosting.claim_descriptors(ServerConfig(max_num_queued_reqs=1900))
    assert "the limit on open files is 2000 (ulimit -n), too low for 1900 requests" in caplog.text
    limit[:] = [100, 100]
    with pytest.raises(ResourceError, match="open files is 100"):
        hosting.claim_descriptors(ServerConfig())


def test_connections_for_which_there_is_no_descriptor_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "MAX_INTERVAL_S", 0.001)
    tries, full = 0, True

    def dup(descriptor: int) -> int:
        nonlocal tries
        tries += 1
        if full:
            raise OSError(24, "Too many open files")
        return os.open(os.devnull, os.O_RDONLY)

    def logged() -> list[str]:
        return [record.message for record in caplog.records if record.name == "x"]

    async def tried_again(times: int) -> None:
        enough = tries + times
        while tries < enough:
            await asyncio.sleep(0.001)

    async def main() -> None:
        nonlocal full
        monkeypatch.setattr(watchdog.os, "dup", dup)
        clock = ManualClock()
        watching = asyncio.create_task(watchdog.watch_descriptors(ThrottledLog(logging.getLogger("x"), clock)))
        await tried_again(5)
        assert len(logged()) == 1
        clock.advance(11)
        await tried_again(2)
        full = False
        await tried_again(2)
        watching.cancel()

    asyncio.run(main())
    first, second = logged()
    assert first == "out of file descriptors (ulimit -n): new connections are closed"
    assert second.startswith(first) and "more since the last such line" in second


def test_a_chat_template_that_would_be_compiled_for_ever(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ 'a' * (10**10) }}")
    assert cli.main(["serve", "--port", "0", *priced(tmp_path), "--chat-template", str(template)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("roseinfer: error: --chat-template: takes more than 256 MiB")
