"""Embeddings by several engines, of which some die."""

import asyncio

from roseinfer.core.outputs import FinishReason
from roseinfer.core.pooling import PoolingInfo, PoolingMethod, PoolingTask
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.live import LiveRequest
from roseinfer.engine.pooling import pooling_prompt
from tests.helpers.engine_info import changed
from tests.helpers.model_engine import INFO, expected_vector
from tests.helpers.routed_fleet import Fleet, Reader, with_fleet

POOLING = PoolingInfo(task=PoolingTask.EMBED, method=PoolingMethod.LAST, width=2)


def test_embeddings_of_a_killed_engine_are_computed_by_another() -> None:
    """Inputs run on both engines when one is killed: each gets its own vector, and gets it once."""

    async def work(fleet: Fleet) -> None:
        for model in fleet.models:
            model.info = changed(INFO, pooling=POOLING)
        await fleet.reach()
        asked: list[tuple[list[int], Reader, LiveRequest]] = []

        def submit(count: int) -> None:
            for _ in range(count):
                ids, reader = [len(asked) + 1] * (3 + len(asked)), Reader()
                request = GenerateRequest(request_id=f"r{len(asked)}", prompt=pooling_prompt(ids))
                asked.append((ids, reader, fleet.routed.submit(request, reader)))

        submit(8)
        assert [len(model.samples) for model in fleet.models] == [4, 4]
        done = {sample.name for sample in list(fleet.models[0].samples.values())[:2]}
        fleet.models[0].step(only=lambda sample: sample.name in done)
        fleet.die(0)
        assert sum(bool(reader.ends) for _, reader, _ in asked) == 2
        submit(2)
        assert len(fleet.models[1].samples) == 4 + 2 + 2
        fleet.finish()
        for ids, reader, _ in asked:
            assert not reader.errors and reader.ends == [FinishReason.STOP]
            assert [chunk.vector for chunk in reader.chunks] == [expected_vector(ids)]
        assert [said[:2] for said in fleet.observed.said].count(("placed again", 0)) == 2

    asyncio.run(with_fleet(work, reached=False))
