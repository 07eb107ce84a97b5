"""K/V that went to host memory and came back gives the same texts as K/V that stayed, or was computed again."""

import random

from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.llm import LLM
from roseinfer.sched.cost import CostModel, CostParams

CONVERSATIONS, TURNS = 5, 3


def turns(rng: random.Random, history: list[list[int]]) -> list[list[int]]:
    """What everybody says next, behind all that was said before."""
    return [said + [rng.randrange(5, 200) for _ in range(rng.randrange(8, 30))] for said in history]


def talk(**options: object) -> tuple[list[list[list[int]]], tuple[int, int, int]]:
    """Conversations over a KV cache that does not hold them all; who runs loses blocks to others, too.

    Returns the tokens of each turn, and preemptions, blocks stored and blocks loaded.
    """
    rng, said = random.Random(3), []
    with LLM("tiny", threads=1, block_size=8, scheduling_policy="fifo", **options) as llm:
        if llm.core.scheduler.offload is not None:  # this model is so small that nothing would be loaded
            llm.core.scheduler.offload._cost = CostModel(CostParams(token_s=1.0), fit=False)
        history = turns(rng, [[rng.randrange(5, 200) for _ in range(40)] for _ in range(CONVERSATIONS)])
        for turn in range(TURNS):
            params = [
                SamplingParams(max_tokens=16, temperature=float(i % 2), seed=turn, ignore_eos=True)
                for i in range(CONVERSATIONS)
            ]
            outputs = [done.samples[0].token_ids for done in llm.generate(history, params)]
            said.append(outputs)
            history = turns(rng, [before + new for before, new in zip(history, outputs, strict=True)])
        stats = llm.core.stats()
    offload = stats.offload
    return said, (stats.preemptions, offload.stored if offload else 0, offload.loaded if offload else 0)


def test_texts_are_the_same_with_and_without_host_memory() -> None:
    calm, (preempted, _, _) = talk(num_kv_blocks=200)
    assert not preempted
    for overlap in (False, True):
        found, (preempted, stored, loaded) = talk(num_kv_blocks=40, kv_offloading_size=1 / 64, overlap=overlap)
        assert found == calm
        assert preempted and stored and loaded
