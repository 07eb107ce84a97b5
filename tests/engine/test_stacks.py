"""An engine whose step never ends: the log says where it is stuck, once, and another takes its place."""

import asyncio
import logging
from pathlib import Path

import pytest

from roseinfer.cluster.supervisor import EngineSupervisor
from roseinfer.config.hub import load_tokenizer
from roseinfer.core import stacks
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.llm import make_engine_config
from roseinfer.engine.transport import UnixSocketTransport
from tests.helpers.hanging_engine import HangingTransport
from tests.server.real_server import priced

PATIENCE_S = 60.0


@pytest.mark.skipif(stacks.SIGNAL is None, reason="there is no signal for it")
def test_the_step_that_hangs_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def act() -> None:
        _, _, _, cost = priced(tmp_path)
        config = make_engine_config(device="priced", cost=cost, num_kv_blocks=64, max_num_seqs=4)
        crew = EngineSupervisor(config, ReplicasConfig(engine_timeout=1.0), stall_s=2.0, make=HangingTransport)
        await crew.launch()
        await crew.connect()
        tokenizer = load_tokenizer(config.model)
        client = await AsyncEngine.start(UnixSocketTransport(crew.addresses[0]), tokenizer)
        try:
            params = SamplingParams(max_tokens=3)
            client.generate(GenerateRequest(request_id="a", prompt=Prompt([40, 41], params)))
            async with asyncio.timeout(PATIENCE_S):
                while not crew.reports()[0].deaths:
                    await asyncio.sleep(0.05)
        finally:
            await client.close()
            await crew.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(act())
    told = [record.getMessage() for record in caplog.records if "when it did not respond:\n" in record.getMessage()]
    assert len(told) == 1, "once"
    assert "in wait_for_ever" in told[0] and told[0].count("hread 0x") > 1, "all threads"
