"""LoRA adapters in a scheduler: they come to slots, requests wait for them, and nothing else waits."""

import pytest

from roseinfer.core.adapters import adapter_key
from roseinfer.core.errors import ADAPTER_UNREADABLE, InvalidRequestError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Cause
from roseinfer.engine.core import EngineCore
from roseinfer.sched.adapters import DRAIN_AFTER_S, MIN_RESIDENCE_S, AdapterSlots
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted
from tests.helpers.fake_adapters import SIZE, FakeAdapterFiles, FakeAdapterSlots, adapter, make_slots
from tests.helpers.fake_runner import FakeRunner

A, B, C = adapter("a"), adapter("b"), adapter("c")


def core_with(slots: AdapterSlots, files: FakeAdapterFiles, **options: object) -> EngineCore:
    runner = FakeRunner(64, 4)
    runner.adapters = FakeAdapterSlots(files, slots.pool.num_slots)
    return make_core(runner=runner, adapters=slots, **options)


def make(num_slots: int = 2, host: int = 100, pinned=(), calls: int = 2, folders=None, **options: object) -> EngineCore:
    files = FakeAdapterFiles(calls, folders)
    return core_with(make_slots(files, num_slots, host, pinned), files, **options)


def loads(core: EngineCore) -> list[tuple[int, str]]:
    return [(load.slot, load.digest) for plan in submitted(core) for load in plan.adapter_loads]


def steps(core: EngineCore, count: int, seconds: float = 0.01) -> dict[str, Collected]:
    collected: dict[str, Collected] = {}
    for _ in range(count):
        core.clock.advance(seconds)
        gather(core.step(), collected)
        core.scheduler.check_integrity()
    return collected


def test_an_adapter_is_read_and_loaded_once_for_all_its_requests() -> None:
    core = make()
    for name in "xyz":
        add(core, name, [5, 6, 7], adapter=A, ignore_eos=True)
    done = run_dry(core)
    assert loads(core) == [(0, A.digest)]
    assert {len(each.tokens) for each in done.values()} == {8}
    assert all(admission.adapter_slot == 0 for plan in submitted(core) for admission in plan.admitted)
    stats = core.stats().adapters
    assert (stats.loads, stats.reads, stats.evictions, stats.waiting, stats.slots_used) == (1, 1, 0, 0, 0)


def test_a_turn_without_anything_but_a_read_is_idle() -> None:
    core = make(calls=3)
    add(core, "x", [5, 6, 7], adapter=A)
    core.step()
    assert core.busy and core.idle_turn and not submitted(core)
    run_dry(core)


def test_a_plan_may_hold_a_load_and_no_rows() -> None:
    core = make(pinned=(A,))
    add(core, "x", [5, 6, 7], adapter=A)
    core.step()
    assert loads(core) == [(0, A.digest)] and not submitted(core)[0].rows
    run_dry(core)


def test_a_request_that_waits_for_its_adapter_blocks_no_other() -> None:
    core = make(calls=1000)
    add(core, "lora", [5, 6, 7], adapter=A)
    add(core, "base", [5, 6, 7], ignore_eos=True)
    done = steps(core, 12)
    assert len(done["base:0"].tokens) == 8 and "lora:0" not in done
    core.abort(["lora:0"])
    done = steps(core, 1)
    assert done["lora:0"].end.why.waited[0][0] is Cause.ADAPTER


def test_base_and_adapters_share_no_prefix() -> None:
    core = make(pinned=(A, B))
    prompt = list(range(5, 17))
    for name, of in (("base", None), ("a", A), ("b", B)):
        add(core, name, prompt, adapter=of)
        assert run_dry(core)[f"{name}:0"].cached_tokens == 0
    add(core, "again", prompt, adapter=A)
    assert run_dry(core)["again:0"].cached_tokens > 0


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nine_adapters_on_eight_slots_all_finish(policy: str, depth: int) -> None:
    core = make(8, scheduling_policy=policy, depth=depth, max_num_seqs=16)
    for round in range(2):
        for number in range(9):
            add(core, f"{number}.{round}", [5, 6, number + 10], adapter=adapter(str(number)), ignore_eos=True)
    done = run_dry(core)
    assert len(done) == 18 and {len(each.tokens) for each in done.values()} == {8}


def test_a_slot_that_others_keep_using_is_replaced_all_the_same() -> None:
    """Requests for one adapter arrive before the last one has ended, so its only slot is never unused."""
    core = make(1, pinned=(A, B))
    for number in range(4):
        add(core, f"a{number}", [5, 6, 7], adapter=A, ignore_eos=True)
        steps(core, 4, MIN_RESIDENCE_S / 2)
    add(core, "b", [5, 6, 7], adapter=B, ignore_eos=True)
    done: dict[str, Collected] = {}
    for number in range(4, 40):
        add(core, f"a{number}", [5, 6, 7], adapter=A, ignore_eos=True)
        done |= steps(core, 4, MIN_RESIDENCE_S / 2)
        assert "b:0" not in done or number * 4 * MIN_RESIDENCE_S / 2 > DRAIN_AFTER_S
    assert done["b:0"].tokens, "the slot drained"
    assert run_dry(core)


def test_a_draining_slot_is_used_again_if_no_other_adapter_is_wanted() -> None:
    core = make(1, pinned=(A, B))
    add(core, "long", [5, 6, 7], adapter=A, ignore_eos=True, max_tokens=40)
    steps(core, 4, MIN_RESIDENCE_S)
    add(core, "b", [5, 6, 7], adapter=B)
    steps(core, 4, DRAIN_AFTER_S)
    add(core, "a", [5, 6, 7], adapter=A, ignore_eos=True)
    assert not steps(core, 3).keys() & {"a:0", "b:0"}
    core.abort(["b:0"])
    assert steps(core, 3)["a:0"].tokens
    assert loads(core) == [(0, A.digest)]
    run_dry(core)


def test_the_least_recently_used_slot_is_replaced() -> None:
    core = make(2, pinned=(A, B, C))
    for number, of in enumerate((A, B, A, C)):
        add(core, str(number), [5, 6, 7], adapter=of)
        run_dry(core)
    assert loads(core) == [(0, A.digest), (1, B.digest), (1, C.digest)]


def test_copies_over_the_budget_of_host_memory_are_forgotten_and_read_again() -> None:
    files = FakeAdapterFiles()
    core = core_with(make_slots(files, 1, host=2, pinned=(A,)), files)
    for number, of in enumerate((B, C, A, B, C)):
        add(core, str(number), [5, 6, 7], adapter=of)
        run_dry(core)
        assert A.digest in files.host and len(files.host) <= 2
    assert files.read_paths == [B.path, C.path, B.path, C.path]
    assert core.stats().adapters.host_bytes == 2 * SIZE


def test_an_adapter_above_the_whole_budget_is_served() -> None:
    core = make(2, host=0)
    for number, of in enumerate((A, B, A)):
        add(core, str(number), [5, 6, 7], adapter=of)
    assert len(run_dry(core)) == 3


def test_an_unreadable_adapter_ends_its_requests_only() -> None:
    core = make(folders={A.path: "no such folder", B.path: C})
    for name, of in (("a", A), ("b", B), ("c", C), ("base", None)):
        add(core, name, [5, 6, 7], n=2, adapter=of)
    done = run_dry(core)
    for name, problem in (("a", "no such folder"), ("b", "its files have changed")):
        for sample in (0, 1):
            end = done[f"{name}:{sample}"].end
            assert end.reason is FinishReason.ERROR and end.error.startswith(f"{ADAPTER_UNREADABLE}'{name}': ")
            assert problem in end.error
    assert all(done[f"{name}:{sample}"].reason is not FinishReason.ERROR for name in ("c", "base") for sample in (0, 1))
    assert core.stats().adapters.failures == 1


def test_an_unreadable_folder_ends_no_request_that_names_another_one() -> None:
    core = make(folders={"/gone": "no such folder", "/copy": A})
    add(core, "x", [5, 6, 7], adapter=A._replace(path="/gone"))
    add(core, "y", [5, 6, 7], adapter=A._replace(path="/copy"))
    done = run_dry(core)
    assert done["x:0"].end.reason is FinishReason.ERROR and done["y:0"].end.reason is not FinishReason.ERROR


def test_adapters_that_others_read_are_in_host_memory() -> None:
    files = FakeAdapterFiles(folders={B.path: "broken"})
    core = core_with(make_slots(files), files)
    files.read("name", A.path)
    files.read("bad", B.path)
    core.step()
    core.step()
    assert core.stats().adapters.host_bytes == SIZE and core.stats().adapters.failures == 1
    add(core, "x", [5, 6, 7], adapter=A)
    core.step()
    assert loads(core) == [(0, A.digest)], "it was not read again"
    run_dry(core)


def test_requests_that_cannot_use_their_adapter_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="rank 32, above the maximum of 16"):
        add(make(), "x", [5], adapter=adapter("wide", rank=32))
    with pytest.raises(InvalidRequestError, match="serves no LoRA adapters"):
        add(make_core(), "x", [5], adapter=A)


def test_seconds_of_residency() -> None:
    core = make(1, pinned=(A, B))
    slots = core.scheduler.adapters
    assert slots.wait_s(A) == pytest.approx(0.002)
    add(core, "long", [5, 6, 7], adapter=A, ignore_eos=True, max_tokens=40)
    for _ in range(10):
        core.clock.advance(0.02)
        plan = core.scheduler.plan(core.clock.now())
        handle = core.runner.submit(plan)
        core.runner.sample(handle, None)
        result = core.runner.collect(handle)
        result.duration_s = 0.02
        core.scheduler.commit(plan, result, core.clock.now())
    assert slots.wait_s(A) == 0
    left = 43 - len(core.scheduler.roster.requests["long:0"].tokens)
    assert slots.wait_s(B) == pytest.approx(max(0.02 * left, MIN_RESIDENCE_S) + 0.002, rel=0.1)
    assert slots.wait_s(C) == pytest.approx(slots.wait_s(B)), "its read is done before the slot is free"
    core.abort(["long:0"])
    run_dry(core)
    core.clock.advance(1.0)
    assert core.scheduler.plan(core.clock.now()) is None
    assert slots.wait_s(C) == pytest.approx(SIZE / 1e9 + 0.002)


def test_a_slot_that_others_keep_using_is_expected_to_drain_first() -> None:
    core = make(num_slots=1, host=9, pinned=(A, B))
    step_s, began = 0.02, 60
    for number in range(3 * began):
        if number % 4 == 0:
            add(core, f"popular{number}", [5, 6, 7], adapter=A, ignore_eos=True)
        if number == began:
            expected_s = core.scheduler.adapters.wait_s(B)
            add(core, "rare", [5, 6, 7], adapter=B, ignore_eos=True)
        if "rare:0" in steps(core, 1, step_s):
            break
    else:
        raise AssertionError("it has not started")
    assert expected_s == pytest.approx((number + 1 - began) * step_s, abs=0.1)


def test_promises_say_where_adapters_are() -> None:
    core = make(2, pinned=(A, B, C))
    for name, of in (("a", A), ("b", B), ("again", A)):
        add(core, name, [5, 6, 7], adapter=of, ignore_eos=True)
        run_dry(core)
    promise = core.promise(core.clock.now())
    keys = [adapter_key(each.digest) for each in (A, B, C)]
    assert promise.device_adapters[:3] == (keys[0], keys[1], 0), "the most recently used first"
    assert set(promise.host_adapters) == {*keys, 0}
    assert promise.adapter_s(keys[0], SIZE) == 0.0
    assert promise.adapter_s(keys[2], SIZE) == pytest.approx(0.002), "a slot is unused"
    assert promise.adapter_s(1, SIZE) == pytest.approx(0.002 + SIZE / 1e9)
    assert make_core().promise(0.0).adapter_s(keys[0], SIZE) == 0.0


def test_waiting_requests_do_not_fill_host_memory_beyond_the_budget() -> None:
    core = make(num_slots=1, host=2, calls=1)
    add(core, "running", [5, 6, 7], adapter=A, ignore_eos=True, max_tokens=60)
    steps(core, 3)
    for name in "cdefgh":
        add(core, name, [5, 6, 7], adapter=adapter(name), ignore_eos=True)
    steps(core, 20, 0.001)
    assert core.stats().adapters.host_bytes <= 2 * SIZE
    assert len(run_dry(core)) == 7
