"""Adapters of an engine on another host, which two servers use."""

from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest
from tests.helpers.in_loop import run, until
from tests.helpers.live_fleet import Stream
from tests.helpers.lora_folders import write_tiny_adapter
from tests.helpers.remote import client, engine_server, tiny_config


def test_every_server_may_load_adapters_of_the_engines_own_folder(tmp_path: Path) -> None:
    async def main() -> None:
        write_tiny_adapter(tmp_path / "a", 1)
        config = replace(tiny_config(), adapters=AdapterConfig(lora_dir=str(tmp_path), lora_max_rank=8))
        async with engine_server(config) as (_, address), client(address) as first, client(address) as second:
            put = await first.put_adapter("x", "a")
            await until(lambda: second.adapters() == {"x": put})
            with pytest.raises(InvalidRequestError, match="not allowed"):
                await second.put_adapter("y", "/etc")
            prompt = Prompt([5, 9, 2, 7], SequenceParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            outputs = []
            for adapter in (None, put):
                meta = RequestMeta(adapter=adapter)
                stream = Stream(GenerateRequest(request_id="r", prompt=replace(prompt, meta=meta)))
                second.submit(stream.request, stream)
                await stream.ended.wait()
                outputs.append(stream.ids[0])
            assert outputs[0] != outputs[1]
            await second.drop_adapter("x")
            await until(lambda: not first.adapters())

    run(main())
