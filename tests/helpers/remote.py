"""An engine's server and its clients, over loopback, in one event loop; and certificates for them."""

import atexit
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engine_server import EngineServer
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.cluster.start import routed_engine
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, PricedConfig, SchedulerConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.engine.live import InflightLimit
from roseinfer.integrations.certificates import CertificateAuthority
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams

LOOPBACK = HostPort("127.0.0.1", 0)
COST = CostParams(step_s=0.002, token_s=1e-6, row_s=1e-6, context_s=1e-9)


def tiny_config() -> EngineConfig:
    """The embedded model, on the CPU."""
    return EngineConfig(
        model=ModelConfig(model="tiny", device="cpu", threads=1),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
    )


def priced_config(folder: Path) -> EngineConfig:
    """An engine without a model, whose steps take 2 ms."""
    cost = folder / "cost.json"
    cost.write_text(json.dumps(cost_as_json(COST)))
    return EngineConfig(
        model=ModelConfig(model="tiny", device="priced"),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
        priced=PricedConfig(cost=str(cost)),
    )


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="certificates-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def authority(name: str = "ours") -> CertificateAuthority:
    """Return a CA; the same one for the same name."""
    return _authority(name)


@cache
def _authority(name: str) -> CertificateAuthority:
    return CertificateAuthority.create()


def write_certificate(folder: Path, ca: str = "ours", *, host: str = "127.0.0.1", days: float = 30.0) -> Path:
    """Write a certificate for `host` that the CA of this name signed. Return the folder."""
    authority(ca).issue([host], days).write(folder)
    return folder


@cache
def own_tls() -> TlsFolder:
    """Return the certificates of a host that belongs to the deployment."""
    return TlsFolder(write_certificate(_folder() / "ours"))


@cache
def foreign_tls() -> TlsFolder:
    """Return the certificates of a host of another deployment."""
    return TlsFolder(write_certificate(_folder() / "foreign", "foreign"))


@contextlib.asynccontextmanager
async def engine_server(
    config: EngineConfig, bind: HostPort = LOOPBACK, tls: TlsFolder | None = None
) -> AsyncIterator[tuple[EngineServer, HostPort]]:
    server = EngineServer(config, bind, tls or own_tls())
    address = await server.launch()
    try:
        await server.connect()
        yield server, address
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def client(
    *addresses: HostPort,
    config: EngineConfig | None = None,
    engine_timeout: float = 10.0,
    stall_s: float = 60.0,
    tls: TlsFolder | None = None,
) -> AsyncIterator[RoutedEngine]:
    tokenizer = load_tokenizer((config or tiny_config()).model)
    replicas = ReplicasConfig(engine_timeout=engine_timeout)
    places = EngineAddresses(list(map(str, addresses)), None, stall_s, str((tls or own_tls()).path))
    engine = await routed_engine(places, tokenizer, replicas, InflightLimit(None))
    try:
        yield engine
    finally:
        await engine.close()
