"""Random loads with objectives on small caches: tokens do not depend on the policy, all requests end, nothing leaks."""

import random
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import StepPlan, StepResult
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from tests.helpers.cases import examples
from tests.helpers.engines import Collected, assert_empty, gather, make_core, submitted
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.waited import check_whys, watch

VOCAB = 12
AT_EASE = 100  # blocks: all jobs fit, and integrity is checked after each step
CUT_SHORT = (FinishReason.ABORT, FinishReason.REJECTED, FinishReason.TIMEOUT)


class TimedRunner(FakeRunner):
    """Runner whose steps take 10 ms, and 1 ms per token."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int = 0) -> None:
        super().__init__(num_blocks, block_size, VOCAB, num_slots=num_slots)
        self.clock = None

    def collect(self, handle: int) -> StepResult:
        result = super().collect(handle)
        plan: StepPlan = next(plan for plan in self.submitted if plan.step == handle)
        result.duration_s = 0.010 + 0.001 * plan.num_tokens
        self.clock.advance(result.duration_s)
        return result


@dataclass(frozen=True)
class Job:
    add: Add
    at_step: int
    abort_after: int | None


def objective(rng: random.Random) -> Slo | None:
    if rng.random() < 0.3:
        return None
    return Slo(
        ttft_s=rng.choice([None, 0.005, 0.05, 0.5]),
        tpot_s=rng.choice([None, 0.005, 0.02, 0.1]),
        e2e_s=rng.choice([None, None, 0.3]),
    )


def make_jobs(rng: random.Random, count: int) -> list[Job]:
    heads = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    jobs = []
    for i in range(count):
        params = SequenceParams(max_tokens=rng.choice([0, 1, 3, 14]), seed=i, ignore_eos=rng.random() < 0.5)
        add = Add(str(i), Prompt([*rng.choice(heads), *rng.choices(range(VOCAB), k=rng.randrange(3))], params))
        add.n = rng.choice([1, 1, 1, 3])
        meta = RequestMeta(
            slo=objective(rng),
            priority=rng.choice([0, 0, 1]),
            predicted_len=rng.choice([None, 1, 5, 100]),
            deadline_s=rng.choice([None, None, 0.3]),
        )
        add.prompt = replace(add.prompt, meta=meta)
        jobs.append(Job(add, rng.randrange(10), rng.randrange(12) if rng.random() < 0.2 else None))
    return jobs


def run(jobs: list[Job], num_blocks: int, block_size: int, **options: object) -> dict[str, Collected]:
    runner = TimedRunner(num_blocks, block_size)
    core = make_core(vocab_size=VOCAB, runner=runner, num_blocks=num_blocks, block_size=block_size, **options)
    runner.clock = core.clock
    watched = watch(core)
    collected: dict[str, Collected] = {}
    aborts: dict[int, list[str]] = {}
    for step in range(3000):
        for job in (job for job in jobs if job.at_step == step):
            core.add(job.add)
            if job.abort_after is not None:
                aborts.setdefault(step + job.abort_after, []).append(f"{job.add.request_id}:0")
        core.abort(aborts.pop(step, []))
        before = core.clock.now()
        gather(core.step(), collected)
        core.scheduler.check_integrity()
        if core.clock.now() == before:
            core.clock.advance(0.002)
        if step > 40 and not core.busy:
            break
    assert not core.busy, "the engine makes no progress"
    assert_empty(core)
    check_plans(core, options)
    check_whys(core, watched, collected)
    return collected


def check_plans(core: EngineCore, options: dict[str, object]) -> None:
    for plan in submitted(core):
        assert plan.num_tokens == sum(row.count for row in plan.rows) <= options["max_num_batched_tokens"]


@examples(200, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["sarathi", "qoserve", "scorpio", "scorpio mixed", "slack", "slack"]),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 24),
    budget=st.integers(1, 40),
    seats=st.integers(1, 6),
    prefix_caching=st.booleans(),
)
def test_objectives_change_when_and_whether_but_never_what(
    seed, policy, depth, block_size, spare_blocks, budget, seats, prefix_caching
) -> None:
    jobs = make_jobs(random.Random(seed), count=10)
    longest = max(len(job.add.prompt.ids) + job.add.prompt.params.max_tokens for job in jobs)
    ease = run(jobs, AT_EASE, 16, max_num_seqs=64, max_num_batched_tokens=4000)
    name, _, mixed = policy.partition(" ")
    own = {"scorpio_mixed": True, "scorpio_stagger": True} if mixed else {}
    if name == "sarathi":
        own = {"sarathi_token_budget": min(16, budget)}
    got = run(
        jobs,
        -(-longest // block_size) + spare_blocks,
        block_size,
        scheduling_policy=name,
        **own,
        depth=depth,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    assert got.keys() == ease.keys()
    for key, want in ease.items():
        have = got[key]
        assert have.end is not None
        if have.reason is FinishReason.REJECTED:
            assert not have.tokens and have.end.rejection is not None
            assert have.end.rejection.predicted_ttft_s >= 0
        if have.reason in CUT_SHORT or want.reason in CUT_SHORT:
            shorter = min(len(want.tokens), len(have.tokens))
            assert have.tokens[:shorter] == want.tokens[:shorter]
        else:
            assert (have.tokens, have.reason) == (want.tokens, want.reason)
