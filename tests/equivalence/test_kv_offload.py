"""K/V that returned from host memory gives the same texts as K/V that stayed or was computed again."""

import random
from functools import cache

from roseinfer import LLM, SamplingParams
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.messages import Add
from roseinfer.runner import threaded
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from tests.helpers.cases import cases
from tests.helpers.late_copies import LateCopies

CONVERSATIONS, TURNS = 5, 3


def turns(rng: random.Random, history: list[list[int]]) -> list[list[int]]:
    """Return the next turn of each conversation, after all earlier ones."""
    return [said + [rng.randrange(5, 200) for _ in range(rng.randrange(8, 30))] for said in history]


def talk(**options: object) -> tuple[list[list[list[int]]], tuple[int, int, int]]:
    """Run conversations over a KV cache that does not hold them all, with preemptions.

    Return the tokens of each turn, and preemptions, blocks stored and blocks loaded.
    """
    rng, said = random.Random(3), []
    with LLM("tiny", threads=1, block_size=8, scheduling_policy="fifo", **options) as llm:
        if llm.engine.core.scheduler.offload is not None:  # this model is so small that nothing would be loaded
            llm.engine.core.scheduler.offload.cost = CostModel(CostParams(token_s=1.0), fit=False)
        history = turns(rng, [[rng.randrange(5, 200) for _ in range(40)] for _ in range(CONVERSATIONS)])
        for turn in range(TURNS):
            params = [
                SamplingParams(max_tokens=16, temperature=float(i % 2), seed=turn, ignore_eos=True)
                for i in range(CONVERSATIONS)
            ]
            outputs = [done.outputs[0].token_ids for done in llm.generate(history, params)]
            said.append(outputs)
            history = turns(rng, [before + new for before, new in zip(history, outputs, strict=True)])
        stats = llm.engine.core.stats()
    offload = stats.offload
    return said, (stats.preemptions, offload.stored if offload else 0, offload.loaded if offload else 0)


@cache
def calm() -> list[list[list[int]]]:
    """Return the tokens of an engine whose KV cache holds all conversations."""
    found, (preempted, _, _) = talk(num_kv_blocks=200)
    assert not preempted
    return found


@cases("overlap", [True], exhaustive=[False])
def test_texts_are_the_same_with_and_without_host_memory(overlap: bool) -> None:
    found, (preempted, stored, loaded) = talk(num_kv_blocks=40, kv_offloading_size=1 / 64, overlap=overlap)
    assert found == calm()
    assert preempted and stored and loaded


@cases("seed", [None], exhaustive=[1, 2])
def test_texts_are_the_same_whenever_a_gpu_gets_to_its_copies(seed: int | None, monkeypatch) -> None:
    """Two steps in flight: the rows of the next step are computed before the copies of this one must have started.

    seed: of the steps at which copies happen; None = as late as can be.
    """
    expected = calm()
    copies = LateCopies(monkeypatch, None if seed is None else random.Random(seed))
    copies.install(monkeypatch)
    monkeypatch.setattr(threaded, "ThreadedRunner", lambda inner: inner)  # as on a GPU: it collects at once
    found, (preempted, stored, loaded) = talk(num_kv_blocks=40, kv_offloading_size=1 / 64, overlap=True)
    assert found == expected
    assert preempted and stored and loaded and copies.moved >= stored + loaded


def test_an_engine_is_closed_after_its_copies(monkeypatch) -> None:
    """Closing releases the memory that the copies use."""
    copies = LateCopies(monkeypatch)
    copies.install(monkeypatch)
    monkeypatch.setattr(threaded, "ThreadedRunner", lambda inner: inner)
    options = {"num_kv_blocks": 40, "kv_offloading_size": 1 / 64, "overlap": True, "block_size": 8}
    llm = LLM("tiny", threads=1, scheduling_policy="fifo", **options)
    offload = llm.engine.core.scheduler.offload
    offload.cost = CostModel(CostParams(token_s=1.0), fit=False)
    for number in range(2):
        llm.engine.core.add(Add(f"{number}", Prompt([7] * 64, SequenceParams(max_tokens=8, ignore_eos=True))))
        while not any(copies.told.values()) and llm.engine.core.busy:
            llm.engine.core.step()
    assert any(copies.told.values()), "under way"
    llm.close()
    assert not any(copies.told.values())
