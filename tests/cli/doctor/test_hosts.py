"""Checks of other hosts: engines that respond or do not, credentials, ports, and Ray's requirements."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.cli.doctor import hosts, probes
from roseinfer.cli.doctor.config import DoctorConfig
from roseinfer.cli.doctor.facts import Torch
from roseinfer.cli.doctor.hosts import check_ray, find_hosts
from roseinfer.core.errors import ConfigError
from tests.helpers.remote import engine_server, foreign_tls, own_tls, priced_config, write_certificate


def test_nobody_asked() -> None:
    assert find_hosts(DoctorConfig()) is None
    with pytest.raises(ConfigError, match="engines needs tls_dir"):
        DoctorConfig(engines="a:1")


def test_engines_are_asked_how_they_do(tmp_path: Path) -> None:
    """Engines that are up, have other options, are missing, speak another protocol, or say nothing."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            engine = priced_config(tmp_path)
            other = replace(engine, cache=replace(engine.cache, block_size=32, num_kv_blocks=256))
            addresses = [(await stack.enter_async_context(engine_server(each)))[1] for each in (engine, other)]
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            with socket.create_server(("127.0.0.1", 0)) as gone:
                nobody = gone.getsockname()[1]
            named = [*map(str, addresses), f"127.0.0.1:{nobody}", f"127.0.0.1:{silent.getsockname()[1]}"]
            config = DoctorConfig(engines=",".join(named), tls_dir=str(own_tls().path))
            found = await asyncio.to_thread(find_hosts, config)
            assert found is not None and found.tls_error is None and 20 < (found.tls_days or 0) < 31
            good, unfit, away, still = found.peers
            assert (good.address, good.error, good.up) == (named[0], None, True)
            assert good.found.startswith("ready, ") and "tiny (none) on priced" in good.found
            assert unfit.misfit and unfit.error == "its block_size is 32, but the other engines have 16"
            assert away.error == "Connection refused"
            assert still.error is not None and "no handshake within" in still.error
            wrong = DoctorConfig(engines=named[0], tls_dir=str(foreign_tls().path))
            (stranger,) = (await asyncio.to_thread(find_hosts, wrong)).peers
            assert "not signed by our CA" in str(stranger.error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts.tcp, "HANDSHAKE_TIMEOUT_S", 0.5)
        asyncio.run(main())


def test_a_private_key_that_others_may_read(tmp_path: Path) -> None:
    (write_certificate(tmp_path) / "tls.key").chmod(0o644)
    found = find_hosts(DoctorConfig(tls_dir=str(tmp_path)))
    assert found is not None and "other users may read" in str(found.tls_error) and found.peers == ()


def test_a_port_that_is_taken_or_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = find_hosts(DoctorConfig(bind=f"127.0.0.1:{port}"))
        assert found is not None and "Address already in use" in str(found.bind_error)
    for bind, error in (
        (f"127.0.0.1:{port}", None),
        ("7000", "HOST:PORT"),
        ("192.0.2.1:7000", "cannot listen"),
    ):
        found = find_hosts(DoctorConfig(bind=bind))
        assert found is not None
        assert found.bind_error is None if error is None else error in str(found.bind_error)


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Fake the parts of Ray that are checked. Return the home folder."""
    monkeypatch.setattr(hosts, "require_ray", lambda: None)
    monkeypatch.setattr(hosts.metadata, "version", lambda name: "2.60.1")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_what_ray_lacks(with_ray: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RAY_AUTH_MODE is not token" in str(check_ray("auto").token_error)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert "no token" in str(check_ray("auto").token_error)
    token = with_ray / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("\n")
    assert "is empty" in str(check_ray("auto").token_error)
    token.write_text("x" * 32)
    token.chmod(0o640)
    assert "others may read" in str(check_ray("auto").token_error)
    token.chmod(0o600)
    found = check_ray("auto")
    assert (found.version, found.error, found.token_error) == ("2.60.1", None, None)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert "no Ray cluster at" in str(check_ray(f"127.0.0.1:{port}").error)
    monkeypatch.setattr(hosts.metadata, "version", lambda name: "2.54.0")
    assert "but 2.60 is required" in str(check_ray("auto").error)


def test_a_problem_with_another_host_is_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "ask_torch", lambda: Torch(version="2.13.0", threads=2, cpu_gflops=50.0))
    options = ["--engines", "127.0.0.1:1", "--tls-dir", str(tmp_path)]
    assert cli.main(["doctor", "--port", "0", "--json", *options]) == 1
    said = json.loads(capsys.readouterr().out)
    (check,) = (check for check in said["checks"] if check["state"] == "problem")
    assert check["name"] == "certificate" and "ca.crt: No such file" in check["found"]
