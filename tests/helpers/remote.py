"""An engine's keeper and its clients, over loopback, in one event loop."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.cluster.start import routed_engine
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, PricedConfig, SchedulerConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.engine.live import InflightLimit
from roseinfer.engine.remote.keeper import EngineKeeper
from roseinfer.engine.remote.secret import Secret
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams

SECRET = Secret(b"tests know this secret")
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


@contextlib.asynccontextmanager
async def keeper(config: EngineConfig, bind: HostPort = LOOPBACK) -> AsyncIterator[tuple[EngineKeeper, HostPort]]:
    kept = EngineKeeper(config, bind, SECRET)
    address = await kept.launch()
    try:
        await kept.connect()
        yield kept, address
    finally:
        await kept.close()


@contextlib.asynccontextmanager
async def client(
    *addresses: HostPort,
    config: EngineConfig | None = None,
    engine_timeout: float = 10.0,
    stall_s: float = 60.0,
    secret_file: Path | None = None,
) -> AsyncIterator[RoutedEngine]:
    tokenizer = load_tokenizer((config or tiny_config()).model)
    replicas = ReplicasConfig(engine_timeout=engine_timeout)
    file = "" if secret_file is None else str(secret_file)
    places = EngineAddresses(list(map(str, addresses)), None, SECRET.value, stall_s, file)
    engine = await routed_engine(places, tokenizer, replicas, InflightLimit(None))
    try:
        yield engine
    finally:
        await engine.close()
