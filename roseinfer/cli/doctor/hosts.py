"""Check engines on other hosts, or whether this host can run one. Failures are returned, never raised."""

import asyncio
import os
import stat
import time
from importlib import metadata
from pathlib import Path

import msgspec

from roseinfer.cli.doctor.config import DoctorConfig
from roseinfer.cli.doctor.facts import Hosts, Peer, RayCluster
from roseinfer.cluster.endpoints import incompatibility
from roseinfer.cluster.remote import tcp
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.connect import Connected, connect
from roseinfer.cluster.remote.handshake import Purpose
from roseinfer.cluster.remote.messages import StatusMessage, StatusUpdate
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.core.errors import RoseinferError
from roseinfer.engine.api import EngineInfo
from roseinfer.integrations.ray.cluster import RAY_SERIES, check_reachable, require_ray
from roseinfer.processes.frames import FrameError

STATUS_TIMEOUT_S = 5.0  # timeout of an engine's first message
_CHUNK_BYTES = 2**16
TOKEN_FILE = "~/.ray/auth_token"


def find_hosts(config: DoctorConfig) -> Hosts | None:
    """Return the facts about other hosts; None if not asked for."""
    if (config.tls_dir, config.bind, config.engines, config.ray_address) == (None,) * 4:
        return None
    tls, tls_error = _tls(config.tls_dir)
    return Hosts(
        tls_dir=config.tls_dir,
        tls_error=tls_error,
        tls_days=None if tls is None else (tls.contexts().expires_s - time.time()) / 86400,
        bind=config.bind,
        bind_error=None if config.bind is None else _bind_error(config.bind),
        peers=() if tls is None else asyncio.run(_peers(config.engine_list, tls)),
        ray=None if config.ray_address is None else check_ray(config.ray_address),
    )


def _tls(folder: str | None) -> tuple[TlsFolder | None, str | None]:
    if folder is None:
        return None, None
    try:
        return TlsFolder(Path(folder)), None
    except RoseinferError as error:
        return None, str(error)


def _bind_error(bind: str) -> str | None:
    try:
        tcp.listen(HostPort.parse(bind, "bind")).close()
    except RoseinferError as error:
        return str(error)
    return None


async def _peers(addresses: tuple[str, ...], tls: TlsFolder) -> tuple[Peer, ...]:
    asked = await asyncio.gather(*(_ask(address, tls) for address in addresses))
    first = next((info for _, info in asked if info is not None), None)
    found = []
    for peer, info in asked:
        unfit = None if first is None or info is None else incompatibility(first, info)
        found.append(peer if unfit is None else Peer(peer.address, peer.found, error=unfit, misfit=True))
    return tuple(found)


async def _ask(address: str, tls: TlsFolder) -> tuple[Peer, EngineInfo | None]:
    """Connect like a server that subscribes to the engine."""
    try:
        connected = await connect(HostPort.parse(address, "engines"), tls, Purpose.STATUS)
        with connected.socket:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                update = await _status_update(connected)
    except TimeoutError as error:
        return Peer(address, error=str(error) or f"it says nothing within {STATUS_TIMEOUT_S:g} s"), None
    except OSError as error:
        return Peer(address, error=tcp.reason(error)), None
    except (RoseinferError, FrameError, msgspec.MsgspecError) as error:
        return Peer(address, error=str(error)), None
    report, away_ms = update.report, 1000 * connected.round_trip_s
    found = f"{report.state.value}, {away_ms:.1f} ms round trip"
    if report.info is not None:
        found += f", {report.info.model} ({report.info.facts.dtype}) on {report.info.facts.device}"
    return Peer(address, found, up=report.health.alive), report.info


async def _status_update(connected: Connected) -> StatusUpdate:
    """Read the engine's first status message."""
    data = b""  # the message may have come together with the end of the handshake
    while True:
        for body in connected.peer.frames.feed(data):
            message: StatusMessage = msgspec.msgpack.decode(body, type=StatusMessage)
            return message
        data = await asyncio.get_running_loop().sock_recv(connected.socket, _CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("it closed the connection")


def check_ray(address: str) -> RayCluster:
    """Check the Ray cluster for `roseinfer deploy` without joining it."""
    try:
        require_ray()
    except RoseinferError as error:
        return RayCluster(address, error=str(error))
    version = metadata.version("ray")
    if not version.startswith(f"{RAY_SERIES}."):
        return RayCluster(address, version, error=f"Ray {version} is installed, but {RAY_SERIES} is required")
    try:
        check_reachable(address)
    except RoseinferError as error:
        return RayCluster(address, version, error=str(error))
    return RayCluster(address, version, token_error=_token_error())


def _token_error() -> str | None:
    """Return why processes of this shell send the cluster no token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return "RAY_AUTH_MODE is not token in this shell"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE).expanduser()
    try:
        status, token = path.stat(), path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        return f"no token in {path} ({getattr(error, 'strerror', None) or 'no text'})"
    if not token:
        return f"{path} is empty"
    return f"others may read {path}: chmod 600 {path}" if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) else None
