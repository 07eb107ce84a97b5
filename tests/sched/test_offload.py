"""K/V in host memory: what is stored and when, who loads instead of computing, and what becomes of those that wait."""

import pytest

from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import StepPlan, StepResult
from roseinfer.core.slo import Cause
from roseinfer.engine.core import EngineCore
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.policy import StepDone
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted
from tests.helpers.fake_runner import FakeRunner

SIZE, BLOCKS = 4, 16
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]  # 3 blocks and a token
FIXED = CostParams(step_s=0.004, token_s=0.001, row_s=0.0, context_s=0.0)


def engine(**options: object) -> EngineCore:
    return make_core(
        **{
            "num_blocks": BLOCKS,
            "block_size": SIZE,
            "num_host_blocks": 64,
            "max_num_batched_tokens": 256,
            "scheduling_policy": "fifo",
            **options,
        }
    )


def priced(load_s: float, store_s: float = 0.0) -> OffloadCosts:
    return OffloadCosts(CostModel(FIXED, fit=False), False, load_s, store_s)


def run(core: EngineCore, name: str, prompt: list[int], **params: object) -> Collected:
    add(core, name, prompt, **{"max_tokens": 3, "ignore_eos": True, "seed": 1, **params})
    return run_dry(core)[f"{name}:0"]


def overwrite(core: EngineCore) -> None:
    """Others use every KV block."""
    run(core, "others", [5] * (core.scheduler.kv.num_blocks * SIZE - 1), max_tokens=1)


def keep(core: EngineCore, prompt: list[int]) -> Collected:
    """Have a prompt in host memory, and nowhere else."""
    run(core, "first", prompt)
    said = run(core, "again", prompt)
    overwrite(core)
    return said


def with_copies(core: EngineCore) -> list[StepPlan]:
    return [plan for plan in submitted(core) if plan.loads or plan.stores]


def test_a_block_is_stored_when_it_is_used_again() -> None:
    core = engine()
    run(core, "a", PROMPT)
    assert not with_copies(core)
    run(core, "b", PROMPT)
    (plan,) = with_copies(core)
    assert len(plan.stores) == 3 and plan.rows, "beside its rows"
    run(core, "c", PROMPT)
    assert with_copies(core) == [plan], "once is enough"


def test_a_hit_in_host_memory_is_loaded_before_its_request_starts() -> None:
    core = engine()
    said = keep(core, PROMPT)
    before = len(submitted(core))
    add(core, "c", PROMPT, max_tokens=3, ignore_eos=True, seed=1)
    done: dict[str, Collected] = {}
    gather(core.step(), done)
    load = submitted(core)[before]
    assert len(load.loads) == 3 and not load.rows and not load.admitted
    assert not core.scheduler.running and len(core.scheduler.waiting) == 1
    assert len(core.scheduler.roster.free_seats) == core.scheduler.config.seats
    run_dry(core, done)
    row = submitted(core)[before + 1].rows[0]
    assert (row.start, row.count) == (12, 1), "only what was not loaded is computed"
    assert done["c:0"].tokens == said.tokens and done["c:0"].cached_tokens == 12
    stats = core.scheduler.stats()
    assert stats.offload is not None
    assert (stats.offload.loaded, stats.offload.hits, stats.offload.waiting) == (3, 12, 0)
    assert stats.prefix_hits == 12, "of the second request: what is loaded is no hit of the KV cache"


def test_a_prompt_that_is_loaded_whole_takes_nothing_from_the_count_of_hits() -> None:
    core = engine()
    keep(core, PROMPT[:12])
    before = core.scheduler.stats()
    assert run(core, "c", PROMPT[:12]).cached_tokens == 11, "the last one is computed for its logits"
    after = core.scheduler.stats()
    assert after.offload is not None and after.offload.loaded == 3
    assert after.prefix_hits == before.prefix_hits


def test_waiting_for_a_load_is_named() -> None:
    core = engine()
    keep(core, PROMPT)
    add(core, "c", PROMPT, max_tokens=2, ignore_eos=True)
    done: dict[str, Collected] = {}
    for _ in range(20):
        core.clock.advance(1.0)
        gather(core.step(), done)
    end = done["c:0"].end
    assert end is not None and end.why is not None
    assert dict(end.why.waited).get(Cause.LOAD) == 1.0


def test_what_is_computed_sooner_is_not_loaded() -> None:
    """12 tokens take 12 ms."""
    for load_s, loads in ((0.005, 0), (0.0039, 3)):
        core = engine(offloading=priced(0.0))
        keep(core, PROMPT)
        assert core.scheduler.offload is not None
        core.scheduler.offload.load_s = load_s
        run(core, "c", PROMPT)
        assert sum(len(plan.loads) for plan in submitted(core)) == loads


def test_steps_that_go_by_are_weighed_against_what_computing_takes_from_all_that_run() -> None:
    """12 tokens take 12 ms; beside others a load takes the step in flight and its own, of 20 ms each."""
    core = engine(offloading=priced(0.0))
    keep(core, PROMPT)
    offload = core.scheduler.offload
    assert offload is not None
    offload._step_s = 0.02
    add(core, "c", PROMPT)
    (request,) = core.scheduler.waiting
    hit = core.scheduler.kv.match("c:0", request.tokens)
    assert len(offload.loadable(request, hit, 1, 0).blocks) == 3, "nobody runs"
    assert [bool(offload.loadable(request, hit, 1, running)) for running in (1, 9, 10)] == [False, False, True]
    core.abort(["c:0"])
    run_dry(core)


def test_policies_see_what_is_left_behind_a_load() -> None:
    core = engine()
    keep(core, PROMPT)
    add(core, "c", PROMPT)
    (request,) = core.scheduler.waiting
    assert core.scheduler.seating.uncached(request) == 1
    core.abort(["c:0"])
    run_dry(core)


def test_two_that_share_a_prefix_load_it_once() -> None:
    core = engine()
    said = keep(core, PROMPT)
    for name in ("c", "d"):
        add(core, name, PROMPT, max_tokens=3, ignore_eos=True, seed=1)
    done = run_dry(core)
    assert sum(len(plan.loads) for plan in submitted(core)) == 3
    assert done["c:0"].tokens == done["d:0"].tokens == said.tokens


def test_a_step_has_no_more_copies_than_its_rows_take() -> None:
    core = engine(offloading=priced(0.002, 0.001), num_blocks=32)
    run(core, "first", PROMPT)
    add(core, "long", [30, 31], max_tokens=40, ignore_eos=True)
    run(core, "again", PROMPT, max_tokens=1)
    stores = [len(plan.stores) for plan in with_copies(core)]
    assert sum(stores) == 3
    overwrite(core)
    add(core, "long", [30, 31], max_tokens=60, ignore_eos=True)
    core.step()
    add(core, "c", PROMPT, max_tokens=2, ignore_eos=True)
    before = len(submitted(core))
    run_dry(core)
    loads = [plan for plan in submitted(core)[before:] if plan.loads]
    assert [len(plan.loads) for plan in loads] == [2, 1], "a step that decodes takes 4 ms"
    assert all(plan.rows for plan in loads), "and nobody who decodes waits"


def test_a_preempted_request_comes_back_by_load() -> None:
    for depth in (1, 2):
        core = engine(depth=depth, num_blocks=12)
        calm = engine(num_blocks=64)
        said = {}
        for each in (core, calm):
            for name in ("a", "b"):
                prompt = [ord(name) % 50] * 12
                add(each, name, prompt, max_tokens=24, ignore_eos=True, seed=1)
            said[each] = run_dry(each)
        assert {n: c.tokens for n, c in said[core].items()} == {n: c.tokens for n, c in said[calm].items()}
        stats = core.scheduler.stats()
        assert stats.preemptions > 0 and stats.offload is not None and stats.offload.loaded > 0
        restarts = [row for plan in submitted(core) for row in plan.rows if row.count > 1 and row.start]
        assert all(row.count <= SIZE for row in restarts), "no more than what fills no block is computed again"


def test_who_ends_while_it_loads_leaves_what_was_loaded_to_others() -> None:
    core = engine(depth=2, offloading=priced(0.004))
    said = keep(core, PROMPT)
    for steps in range(4):
        add(core, "c", PROMPT, max_tokens=3, ignore_eos=True)
        done: dict[str, Collected] = {}
        for _ in range(steps):
            gather(core.step(), done)
        core.abort(["c:0"])
        assert run_dry(core, done)["c:0"].reason is FinishReason.ABORT
    assert run(core, "d", PROMPT).tokens == said.tokens


def test_blocks_that_wait_for_a_seat_go_to_those_that_run() -> None:
    core = engine(max_num_seqs=1, num_blocks=8, offloading=priced(0.0))
    run(core, "first", PROMPT[:9])
    run(core, "again", PROMPT[:9])
    overwrite(core)
    add(core, "c", PROMPT[:9], max_tokens=2, ignore_eos=True)
    core.step()  # its load is planned and done
    offload = core.scheduler.offload
    assert offload is not None and offload.num_loads == 1
    held = core.scheduler.kv.num_blocks - core.scheduler.kv.num_free
    assert held == 2
    assert offload.reclaim()
    assert core.scheduler.kv.num_free == 8 and offload.num_loads == 0
    run_dry(core)


def test_a_request_whose_load_is_taken_back_waits_as_before() -> None:
    core = engine(offloading=priced(0.0))
    said = keep(core, PROMPT)
    add(core, "c", PROMPT, max_tokens=3, ignore_eos=True, seed=1)
    (request,) = core.scheduler.waiting
    host_hit = core.scheduler.seating.host_hit_after(request, 0)
    assert host_hit is not None and len(host_hit.blocks) == 3
    core.scheduler.offload.begin(request, host_hit)
    assert not core.scheduler.waiting.ready()
    assert core.scheduler.offload.reclaim(loads=True)
    core.scheduler.check_integrity()
    assert core.scheduler.waiting.ready() == [request] and not request.loading
    assert core.scheduler.kv.num_free == BLOCKS
    assert run_dry(core)["c:0"].tokens == said.tokens


class Timed(FakeRunner):
    """Machine whose rows take a time that the cost model cannot predict better, and `copy_s` per copied block."""

    def __init__(self, copy_s: float, *, copies_first: bool = False) -> None:
        super().__init__(BLOCKS, SIZE, 50, num_host_blocks=64)
        self.copy_s, self.copies_first = copy_s, copies_first

    def collect(self, handle: int) -> StepResult:
        plan, result = self.submitted[handle], super().collect(handle)
        assert plan.step == handle
        loads_s, stores_s = len(plan.loads) * self.copy_s, len(plan.stores) * self.copy_s
        rows_s = FIXED.seconds(FIXED.work(plan.rows)) if plan.rows else 0.0
        duration_s = rows_s + loads_s + stores_s if self.copies_first else max(rows_s, loads_s, stores_s)
        return StepResult(handle, result.rows, duration_s, loads_s, stores_s, self.copies_first)


class Noted(CostModel):
    """Policy that records by how much each step took longer than predicted."""

    def __init__(self) -> None:
        super().__init__(FIXED, fit=False)
        self.excess_s: list[float] = []

    def observe(self, work: Work, seconds: float) -> None:
        self.excess_s.append(abs(seconds - FIXED.seconds(work)))


@pytest.mark.parametrize("copies_first", [False, True])
def test_copies_are_not_taken_for_rows(copies_first: bool) -> None:
    """Nor is it told of steps that copies beside the rows made as long as they were."""
    cost, seen = Noted(), []
    core = engine(runner=Timed(0.003, copies_first=copies_first), offloading=OffloadCosts(cost, True, 1e-6, 1e-6))
    core.scheduler.policy.observe = seen.append
    keep(core, PROMPT)
    run(core, "c", PROMPT)
    assert any(plan.stores for plan in submitted(core) if plan.rows)
    assert sum(len(plan.loads) for plan in submitted(core)) == 3
    with_rows = [plan for plan in submitted(core) if plan.rows]
    assert len(cost.excess_s) == len(with_rows) if copies_first else len(cost.excess_s) < len(with_rows)
    assert max(cost.excess_s) < 1e-9
    told = [event for event in seen if isinstance(event, StepDone) and event.duration_s]
    assert len(told) == len(cost.excess_s)
    assert all(abs(event.duration_s - FIXED.seconds(FIXED.work(event.plan.rows))) < 1e-9 for event in told)


def test_speeds_follow_what_steps_say() -> None:
    runner = Timed(0.002)
    core = engine(runner=runner, offloading=priced(0.0))
    offload = core.scheduler.offload
    assert offload is not None
    run(core, "first", PROMPT)
    assert offload.store_s == 0.0, "nothing was copied yet"
    run(core, "again", PROMPT)
    assert offload.store_s == pytest.approx(0.002)
    runner.copy_s = 0.001
    for name in ("b", "c"):
        run(core, name, [30 + token for token in PROMPT])
    assert 0.001 < offload.store_s < 0.002
    overwrite(core)
    run(core, "d", PROMPT)
    assert offload.load_s == pytest.approx(0.001)
