"""States in host memory: which are stored, who continues from them, and what becomes of loads whose request ends."""

from roseinfer.core.outputs import FinishReason
from roseinfer.engine.core import EngineCore
from tests.helpers.engines import add, make_core, run_dry, submitted
from tests.sched.test_states import SIZES, answer, cached, text


def core_of(num_slots: int = 4, **options: object) -> EngineCore:
    return make_core(
        num_slots=num_slots,
        num_host_blocks=500,
        **{"num_host_slots": 30, "scheduling_policy": "fifo", **SIZES, **options},
    )


def crowd(core: EngineCore, first: int, count: int = 8) -> None:
    """Run prompts that overwrite all snapshots."""
    for seed in range(first, first + count):
        answer(core, f"c{seed}", text(seed, 100))


def test_a_prefix_continues_from_a_state_in_host_memory() -> None:
    without, core, prompt = core_of(num_host_slots=0), core_of(), text(1, 100)
    for engine, found in ((without, 0), (core, 96)):
        cached(engine, prompt)
        crowd(engine, 10)
        assert cached(engine, prompt) == found
    stats = core.stats()
    assert stats.states is not None and stats.offload is not None
    assert stats.states.loaded == 1 and stats.states.stored >= 8 and stats.offload.loaded == 0
    assert stats.offload.hits == 96 and stats.prefix_hits == 0, "it was loaded, not found"
    assert stats.states.host_used == stats.states.stored <= stats.states.host_total == 30
    core.scheduler.check_integrity()


def test_blocks_and_their_state_are_loaded_together() -> None:
    core, prompt = core_of(num_blocks=40), text(1, 100)
    cached(core, prompt)
    cached(core, prompt)  # what is used again is stored
    crowd(core, 10, 20)
    assert cached(core, prompt) == 96
    loads = [plan for plan in submitted(core) if plan.states is not None and plan.states.loads]
    assert len(loads) == 1 and len(loads[0].loads) == 6
    core.scheduler.check_integrity()


def test_the_last_snapshot_of_a_preempted_request_is_stored() -> None:
    core = core_of(num_slots=8)
    add(core, "a", text(1, 100), max_tokens=300, ignore_eos=True)
    for _ in range(150):
        core.step()
    request, kv = core.scheduler.roster.requests["a:0"], core.scheduler.kv
    computed = request.computed
    core.scheduler.roster.preempt(request)
    core.step()
    core.step()
    assert kv.host_states is not None
    last = kv.host_states.find_longest(kv.chain("a:0"), request.tokens, computed)
    assert computed - 64 < last.tokens <= computed and kv.host_states.stored == 1
    assert run_dry(core)["a:0"].reason is FinishReason.LENGTH


def test_a_request_that_ends_while_its_state_is_loaded_leaves_nothing() -> None:
    core, prompt = core_of(), text(1, 100)
    cached(core, prompt)
    crowd(core, 10)
    add(core, "late", prompt, max_tokens=4, ignore_eos=True)
    add(core, "other", text(40, 30), max_tokens=30, ignore_eos=True)
    core.step()
    assert core.stats().offload is not None and core.stats().offload.waiting == 1
    core.abort(["late:0"])
    core.scheduler.check_integrity()
    run_dry(core)
    assert core.stats().offload.waiting == 0 and cached(core, prompt) == 96
