"""Engine processes: same results as in this process, typed errors, and no leftovers."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.config.hub import load_tokenizer, resolve_model
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import ConfigError, EngineDeadError, UnsupportedModelError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.options import make_engine_config
from roseinfer.engine.process_transport import ProcessTransport
from tests.helpers.cases import cases
from tests.helpers.remote import priced_config


def tiny(**given: object) -> EngineConfig:
    return make_engine_config(**{"num_kv_blocks": 256, "max_num_seqs": 8, "threads": 1, **given})


@asynccontextmanager
async def engine(config: EngineConfig) -> AsyncIterator[tuple[AsyncEngine, ProcessTransport]]:
    transport = ProcessTransport(config, resolve_model(config.model.model))
    client = await AsyncEngine.start(transport, load_tokenizer(config.model))
    try:
        yield client, transport
    finally:
        await client.close()


def request(name: str, prompt_ids: list[int], **params: object) -> GenerateRequest:
    sampling = SequenceParams(**{"max_tokens": 20, "temperature": 0.0, **params})
    return GenerateRequest(request_id=name, prompt=Prompt(prompt_ids, sampling))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@cases("overlap", [True], exhaustive=[False])
def test_an_engine_process_gives_the_results_of_an_engine_in_this_process(overlap: bool) -> None:
    with LLM("tiny", num_kv_blocks=256, max_num_seqs=8, threads=1) as llm:
        prompt_ids = llm.engine.tokenizer.encode("def fibonacci(")
        expected = llm.generate([prompt_ids], SamplingParams(max_tokens=20, temperature=0.0))[0]

    async def main() -> None:
        async with engine(tiny(overlap=overlap)) as (client, transport):
            chunks = [chunk async for chunk in client.generate(request("a", prompt_ids))]
            assert [i for chunk in chunks for i in chunk.token_ids] == expected.outputs[0].token_ids
            assert "".join(chunk.text for chunk in chunks) == expected.outputs[0].text
            assert client.info.facts.max_model_len == 2048
            ids = load_tokenizer(tiny().model).encode("def f(x):\n    return x\n")
            chunks = [chunk async for chunk in client.generate(request("b", ids, max_tokens=100))]
            assert chunks[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert "<|" not in "".join(chunk.text for chunk in chunks)
            pid = transport.pid
        assert pid is not None and not alive(pid)

    asyncio.run(main())


def test_a_killed_process_ends_every_stream_and_health_reports_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(priced_config(tmp_path)) as (client, transport):
            streams = [
                client.generate(request(f"r{i}", [5, 6, 7 + i], max_tokens=1500, ignore_eos=True)) for i in range(6)
            ]
            await streams[0].__anext__()
            assert transport.pid is not None
            os.kill(transport.pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                for stream in streams:
                    with pytest.raises(EngineDeadError):
                        async for _ in stream:
                            pass
            health = client.health()
            assert not health.alive
            assert "-9" in (health.error or "")
            with pytest.raises(EngineDeadError):
                client.generate(request("late", [5]))

    asyncio.run(main())


def test_requests_to_a_process_whose_death_is_unnoticed_fail_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(priced_config(tmp_path)) as (client, transport):
            running = client.generate(request("running", [5, 6, 7], max_tokens=1500, ignore_eos=True))
            await running.__anext__()
            assert transport.pid is not None
            os.kill(transport.pid, signal.SIGKILL)
            time.sleep(0.5)  # the sockets notice, the event loop does not
            late = client.generate(request("late", [5]))
            running.cancel()
            async with asyncio.timeout(20):
                with pytest.raises(EngineDeadError):
                    await late.__anext__()

    asyncio.run(main())


class EndedTransport(ProcessTransport):
    module = "keyword"  # does nothing


def test_a_process_that_ends_before_it_reads_its_boot_struct_is_a_dead_engine(tmp_path: Path) -> None:
    async def main() -> None:
        transport = EndedTransport(priced_config(tmp_path), resolve_model("tiny"))
        with pytest.raises(EngineDeadError, match="ended with code 0"):
            await transport.start(lambda message: None, lambda reason: None)
        assert not transport.address.parent.exists()

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        transport = ProcessTransport(priced_config(tmp_path), resolve_model("tiny"))
        starting = asyncio.create_task(transport.start(lambda message: None, lambda reason: None))
        while transport.pid is None:
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not alive(transport.pid) and not transport.address.parent.exists()

    asyncio.run(main())


@pytest.mark.usefixtures("executed")
def test_closing_under_load_leaves_no_process_thread_or_descriptor(tmp_path: Path) -> None:
    async def main() -> None:
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for round in range(2):
            async with engine(priced_config(tmp_path)) as (client, transport):
                stream = client.generate(request(f"r{round}", [5, 6, 7], max_tokens=1500, ignore_eos=True))
                await stream.__anext__()
                private, pid = transport.address.parent, transport.pid
            assert not private.exists()
            assert pid is not None and not alive(pid)
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) <= files

    if not Path("/proc/self/fd").exists():
        pytest.skip("counts open files through /proc")
    asyncio.run(main())


def test_errors_of_the_start_are_raised_with_their_type(tmp_path: Path) -> None:
    async def start(config: EngineConfig, folder: Path) -> None:
        transport = ProcessTransport(config, folder)
        await AsyncEngine.start(transport, load_tokenizer(tiny().model))

    (tmp_path / "config.json").write_text('{"architectures": ["StrangeForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match="StrangeForCausalLM"):
        asyncio.run(start(tiny(), tmp_path))
    with pytest.raises(ConfigError, match="max_model_len"):
        priced = priced_config(tmp_path)
        too_long = replace(priced, model=replace(priced.model, max_model_len=10**6))
        asyncio.run(start(too_long, resolve_model("tiny")))
