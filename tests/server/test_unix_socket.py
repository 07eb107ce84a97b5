"""`serve --uds`: requests over a Unix socket, its file from start to end, and what cannot be combined with it."""

import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.server.hosting import listen, remove_socket
from tests.helpers.cases import cases
from tests.server.real_server import PATIENCE_S, priced

BODY = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # a short path: those of sockets are limited
    return "roseinfer.sock"


@pytest.mark.usefixtures("executed")
@cases("workers", [2], exhaustive=[1])
def test_a_server_on_a_unix_socket(path: str, workers: int) -> None:
    command = ["serve", "--uds", path, "--api-workers", str(workers), *priced(Path(), 0.001)]
    with subprocess.Popen(
        [sys.executable, "-m", "roseinfer.cli", *command], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            first, example = server.stdout.readline(), server.stdout.readline()
            assert re.match(rf"tiny is served on unix:{path}; try$", first)
            curl, option, given, url, *_ = shlex.split(example)
            assert (curl, option, given) == ("curl", "--unix-socket", path)
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=PATIENCE_S) as client:
                assert client.post(url.replace("/chat", ""), json=BODY).text.endswith("data: [DONE]\n\n")
                assert client.get("http://elsewhere.example/v1/models").json()["error"]["code"] == "host_not_allowed"
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()
    assert not Path(path).exists()


def test_the_file_of_a_socket(path: str) -> None:
    config = ServerConfig(uds=path)
    listen(config).close()  # as a killed server leaves it
    with listen(config) as listener:
        with pytest.raises(ConfigError, match=r"uds: cannot listen on 'roseinfer\.sock': .* in use; stop the other"):
            listen(config)
        remove_socket(listener)
    assert not Path(path).exists()
    Path(path).write_text("kept")
    with pytest.raises(ConfigError, match="a file that is no socket is there"):
        listen(config)
    assert Path(path).read_text() == "kept"
    with pytest.raises(ConfigError, match="uds: cannot listen on 'nowhere/s': No such file"):
        listen(ServerConfig(uds="nowhere/s"))
    with pytest.raises(ConfigError, match="too long"):
        listen(ServerConfig(uds="x" * 200))
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        remove_socket(tcp)


@pytest.mark.parametrize(("name", "value"), [("host", "0.0.0.0"), ("port", 9000)])
def test_a_second_address_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--uds cannot be combined with --{name}:"):
        ServerConfig(uds="s", **{name: value})  # type: ignore[arg-type]
