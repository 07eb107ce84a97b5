"""Directory of a deployment, without Ray: its processes connect with the certificates that it issues."""

import asyncio
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roseinfer.cluster.remote.handshake import HandshakeError, Purpose, VerifiedPeer, accept, introduce, read_purpose
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.core.errors import ResourceError
from roseinfer.integrations.certificates import CertificateAuthority
from roseinfer.integrations.ray import directory
from roseinfer.integrations.ray.directory import DirectoryActor, fetch_certificate, start_directory


class FakeRay(SimpleNamespace):
    """Stand-in for the `ray` module with one named actor, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.actor: Any = None
        self.reconstructed = False

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(was_current_actor_reconstructed=self.reconstructed)

    def get_actor(self, name: str, namespace: str) -> Any:
        if self.actor is None:
            raise ValueError("no actor")
        return self.actor

    def remote(self, cls: type) -> Any:
        def start(*arguments: Any) -> Any:
            self.arguments, made = arguments, cls(*arguments)
            self.actor = _actor(made)
            return self.actor

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=start))

    def restart(self) -> None:
        """Make the actor again with the same arguments, as Ray does."""
        self.reconstructed = True
        made = DirectoryActor(*self.arguments)
        self.actor = _actor(made)


def _actor(made: DirectoryActor) -> SimpleNamespace:
    names = ("certificate", "reserve", "exchange_metrics")
    return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(made, name)) for name in names})


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def fetched(name: str, folder: Path) -> TlsFolder:
    folder.mkdir(mode=0o700)
    return asyncio.run(fetch_certificate(name, folder))


def connect(engine: TlsFolder, api: TlsFolder, name: str) -> list[Any]:
    """Return both ends, or their errors, of a connection from an API process to the engine of this name."""

    async def both() -> list[Any]:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            other.setblocking(False)

            async def serve() -> VerifiedPeer:
                return await accept(one, engine.contexts(), await read_purpose(one), 1)

            client = introduce(other, api.contexts(), name, Purpose.ENGINE)
            async with asyncio.timeout(20):
                return list(await asyncio.gather(serve(), client, return_exceptions=True))

    return asyncio.run(both())


def test_processes_of_a_deployment_connect_and_check_the_engine_s_name(ray: FakeRay, tmp_path: Path) -> None:
    assert start_directory() is start_directory()
    engine, api = fetched("engine-1", tmp_path / "engine"), fetched("api-1", tmp_path / "api")
    assert all(isinstance(each, VerifiedPeer) for each in connect(engine, api, "engine-1"))
    _, refused = connect(engine, api, "engine-2")
    assert isinstance(refused, HandshakeError) and "engine-2" in str(refused), "the previous engine at its address"


def test_a_restarted_directory_is_the_same_authority(ray: FakeRay, tmp_path: Path) -> None:
    start_directory()
    engine = fetched("engine-1", tmp_path / "engine")
    ray.restart()
    api = fetched("api-1", tmp_path / "api")
    assert all(isinstance(each, VerifiedPeer) for each in connect(engine, api, "engine-1"))


def test_another_deployment_is_rejected(ray: FakeRay, tmp_path: Path) -> None:
    start_directory()
    engine = fetched("engine-1", tmp_path / "engine")
    CertificateAuthority.create().issue(["api-1"], 1.0).write(tmp_path / "foreign")
    ends = connect(engine, TlsFolder(tmp_path / "foreign"), "engine-1")
    assert all(isinstance(end, HandshakeError) for end in ends)


def test_a_directory_of_an_earlier_version_must_be_stopped_first(ray: FakeRay) -> None:
    ray.actor = SimpleNamespace(engines=None)
    with pytest.raises(ResourceError, match="stop it first with --down"):
        start_directory()
    assert directory.find_directory() is ray.actor
