"""Random loads with every kind of objective on a small KV cache under slack: the policy itself ends all requests.

Concurrent requests have a TTFT, a TPOT, both, a deadline, all three, or none. Some prompts exceed a step; some outputs
are empty or longer than predicted. The scheduler's rescue (`policy_stalls`) is never needed, no request fails, and no
step exceeds its limits (the runner checks them).
"""

import random
from itertools import count

import pytest

from roseinfer.core.outputs import COMPLETE, FinishReason
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from tests.helpers.cases import cases
from tests.helpers.engines import Collected, assert_empty, gather, make_core
from tests.property.test_slo import TimedRunner

KINDS = ["none", "ttft", "tpot", "e2e", "both", "all"]
BLOCK_SIZE = 4
MOST_STEPS = 20_000


def objective(kind: str, rng: random.Random) -> Slo | None:
    """Draw loose, tight and impossible objectives for a machine with 10 ms per step and 1 ms per token."""
    ttft_s, tpot_s, e2e_s = rng.choice([0.1, 0.5, 3.0]), rng.choice([0.012, 0.03, 0.2]), rng.choice([0.3, 1.0, 9.0])
    return {
        "none": None,
        "ttft": Slo(ttft_s=ttft_s),
        "tpot": Slo(tpot_s=tpot_s),
        "e2e": Slo(e2e_s=e2e_s),
        "both": Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        "all": Slo(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s),
    }[kind]


def request(name: str, kind: str, rng: random.Random, arrival_s: float) -> Add:
    output = rng.choice([0, 1, 3, 10, 40])
    said = rng.choice([None, max(1, output), 1, 10 * output + 1])
    params = SequenceParams(max_tokens=output, ignore_eos=True, seed=rng.randrange(4))
    meta = RequestMeta(
        slo=objective(kind, rng),
        predicted_len=said,
        hinted=said is not None and rng.random() < 0.5,
        priority=rng.choice([0, 0, -1]),
        tenant=rng.choice(["", "other"]),
        arrival_s=arrival_s,
    )
    prompt = [rng.randrange(12) for _ in range(rng.choice([1, 5, 20, 80]))]
    return Add(name, Prompt(prompt, params, meta), rng.choice([1, 1, 1, 3]))


def small_core(rng: random.Random) -> EngineCore:
    """Return a core whose cache holds the longest request (120 tokens) and little more."""
    runner = TimedRunner(blocks := rng.choice([31, 40, 60]), BLOCK_SIZE)
    core = make_core(
        vocab_size=12,
        runner=runner,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        depth=rng.choice([1, 2]),
        prefix_caching=rng.random() < 0.5,
        max_num_seqs=rng.choice([2, 8]),
        max_num_batched_tokens=rng.choice([16, 64]),
        scheduling_policy="slack",
    )
    runner.clock = core.clock
    return core


def serve(core: EngineCore, kinds: list[str], rng: random.Random) -> dict[str, Collected]:
    """Serve some 30 requests, in bursts, until all have ended."""
    done: dict[str, Collected] = {}
    names, next_s = (str(number) for number in count()), 0.0
    left = 30
    for _ in range(MOST_STEPS):
        now_s = core.clock.now()
        while left and next_s <= now_s:
            core.add(request(next(names), rng.choice(kinds), rng, now_s))
            left, next_s = left - 1, next_s + rng.choice([0.0, 0.02, 0.2])
        if not left and not core.busy:
            return done
        gather(core.step(), done)
        core.scheduler.check_integrity()
        if core.clock.now() == now_s:
            core.clock.advance(0.002)
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids=lambda kinds: "+".join(kinds))
@cases("seed", range(1), exhaustive=range(1, 6))
def test_all_requests_end_by_the_policy_itself(kinds: list[str], seed: int) -> None:
    rng = random.Random(f"{kinds} {seed}")
    core = small_core(rng)
    done = serve(core, kinds, rng)
    assert_empty(core)
    assert len(done) >= 30
    assert all(each.reason in (*COMPLETE, FinishReason.REJECTED) for each in done.values())
    stats = core.scheduler.stats()
    assert (stats.policy_stalls, stats.policy_faults) == (0, 0)
    state = core.scheduler.policy.state
    assert not (state.unpromised or state.preempted or state.ledger.waiting or len(state.batch))
    assert state.promised == 0
