"""A hanging engine's stacks are logged once; then the engine is restarted."""

import asyncio
import logging
from pathlib import Path

import pytest

from roseinfer.cluster.supervisor import EngineSupervisor
from roseinfer.config.hub import load_tokenizer
from roseinfer.core import stacks
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.options import make_engine_config
from roseinfer.engine.transport import UnixSocketTransport
from tests.helpers.hanging_engine import HangingTransport
from tests.server.real_server import priced

PATIENCE_S = 60.0


@pytest.mark.skipif(stacks.SIGNAL is None, reason="this system has no SIGUSR1")
def test_the_log_shows_the_stacks_of_a_hanging_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def act() -> None:
        _, _, _, cost = priced(tmp_path)
        config = make_engine_config(device="priced", cost=cost, num_kv_blocks=64, max_num_seqs=4)
        supervisor = EngineSupervisor(config, ReplicasConfig(engine_timeout=1.0), stall_s=2.0, make=HangingTransport)
        await supervisor.launch()
        await supervisor.connect()
        tokenizer = load_tokenizer(config.model)
        client = await AsyncEngine.start(UnixSocketTransport(supervisor.addresses[0]), tokenizer)
        try:
            params = SequenceParams(max_tokens=3)
            client.generate(GenerateRequest(request_id="a", prompt=Prompt([40, 41], params)))
            async with asyncio.timeout(PATIENCE_S):
                while not supervisor.reports()[0].deaths:
                    await asyncio.sleep(0.05)
        finally:
            await client.close()
            await supervisor.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(act())
    stacks = [record.getMessage() for record in caplog.records if "when it did not respond:\n" in record.getMessage()]
    assert len(stacks) == 1, "once"
    assert "in wait_for_ever" in stacks[0] and stacks[0].count("hread 0x") > 1, "all threads"
