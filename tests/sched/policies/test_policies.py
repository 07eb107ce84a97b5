"""Starts in a step: the policies on hand-made queues, then through the scheduler."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Prompt, Request, Status
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.policy import Admitted, Policy, Verdict, View
from roseinfer.sched.registry import make_policy, scheduler_config
from tests.helpers.cases import examples
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted

CONTEXT = 10_000


def queue_of(costs: list[int]) -> list[Request]:
    return [Request(str(i), Prompt([1] * cost, SequenceParams())) for i, cost in enumerate(costs)]


def view_of(waiting: list[Request], *, seats: int = 64, context: int = CONTEXT, running: int = 0) -> View:
    return View(
        now_s=0.0,
        step=0,
        free_seats=seats,
        free_blocks=1000,
        block_size=16,
        token_budget=4096,
        max_model_len=context,
        running=tuple(queue_of([1] * running)),
        num_waiting=len(waiting),
        waiting=lambda: list(waiting),
        members=lambda lead: (lead,),
        uncached=lambda request: len(request.tokens),
        can_start=lambda request: request.status is Status.WAITING,
    )


def started(policy: Policy, waiting: list[Request], **options: int) -> list[int]:
    """Return the requests that start in one step, asked as the scheduler does; they leave the queue."""
    decision = policy.begin(view_of(waiting, **options))
    chosen = []
    for request in decision.order(list(waiting)):
        verdict = decision.admit(request)
        if verdict is Verdict.STOP:
            break
        if verdict is Verdict.ADMIT:
            chosen.append(request)
    for request in chosen:
        waiting.remove(request)
        policy.observe(Admitted(request.request_id, 0.0, 0))
    return [int(request.request_id) for request in chosen]


def policy(name: str, **options: object) -> Policy:
    return make_policy(scheduler_config(scheduling_policy=name, **options))


def test_fifo_starts_what_fits_and_leaves_the_next_at_the_head() -> None:
    waiting = queue_of([2, 2, 2])
    assert started(policy("fifo", prefill_max_tokens=4), waiting) == [0, 1]
    assert [request.request_id for request in waiting] == ["2"]


def test_fifo_runs_an_oversized_head_alone() -> None:
    waiting = queue_of([100, 1])
    fifo = policy("fifo", prefill_max_tokens=4, enable_chunked_prefill=False)
    assert started(fifo, waiting) == [0]
    assert started(fifo, waiting) == [1]


def test_a_request_costs_no_more_than_the_context() -> None:
    fifo = policy("fifo", prefill_max_tokens=16)
    assert started(fifo, queue_of([100, 100]), context=8) == [0, 1]


def test_pack_starts_the_short_ones_and_leaves_the_long_one_at_the_head() -> None:
    waiting = queue_of([100, 2, 2])
    assert started(policy("pack", prefill_max_tokens=4, prefill_admission_lookahead=16), waiting) == [1, 2]
    assert [request.request_id for request in waiting] == ["0"]


def test_pack_runs_the_head_alone_when_nothing_fits() -> None:
    assert started(policy("pack", prefill_max_tokens=4), queue_of([100, 100])) == [0]


def test_pack_takes_the_cheapest_first_and_starts_them_in_order_of_arrival() -> None:
    waiting = queue_of([3, 1, 2, 1, 5])
    assert started(policy("pack", prefill_max_tokens=4), waiting) == [1, 2, 3]
    assert [request.request_id for request in waiting] == ["0", "4"]


def test_pack_breaks_ties_by_arrival() -> None:
    assert started(policy("pack", prefill_max_tokens=4), queue_of([2, 2, 2])) == [0, 1]


def test_pack_looks_no_further_than_its_window() -> None:
    pack = policy("pack", prefill_max_tokens=4, prefill_admission_lookahead=2)
    assert started(pack, queue_of([100, 90, 1])) == [0]


def test_pack_without_a_token_budget_is_fifo() -> None:
    assert started(policy("pack"), queue_of([100, 2, 50])) == [0, 1, 2]


@pytest.mark.parametrize("name", ["fifo", "pack"])
def test_the_number_of_starts_is_bounded_by_batch_seats_and_active_requests(name: str) -> None:
    assert started(policy(name, prefill_max_batch_size=2), queue_of([1] * 5)) == [0, 1]
    assert started(policy(name), queue_of([1] * 5), seats=3) == [0, 1, 2]
    active = policy(name, max_active_requests=4, prefill_max_tokens=100)
    assert started(active, queue_of([1] * 5), running=3) == [0]
    assert started(active, queue_of([1] * 5), running=4) == []


def test_force_fifo_every_lets_a_long_prompt_through() -> None:
    pack = policy("pack", prefill_max_tokens=4, prefill_force_fifo_every=3)
    waiting = queue_of([100] + [2] * 12)
    steps = [started(pack, waiting) for _ in range(3)]
    assert steps == [[1, 2], [3, 4], [0]]


def test_max_skips_lets_a_long_prompt_through() -> None:
    pack = policy("pack", prefill_max_tokens=4, prefill_max_skips=2)
    waiting = queue_of([100] + [2] * 12)
    steps = [started(pack, waiting) for _ in range(4)]
    assert steps == [[1, 2], [3, 4], [0], [5, 6]]


@examples(200, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["fifo", "pack"]),
    budget=st.integers(1, 20),
    limit=st.integers(1, 6),
    bound=st.sampled_from([{"prefill_force_fifo_every": 4}, {"prefill_max_skips": 3}]),
)
def test_budget_order_and_progress(seed: int, name: str, budget: int, limit: int, bound: dict[str, int]) -> None:
    rng = random.Random(seed)
    options = bound if name == "pack" else {}
    tested = policy(name, prefill_max_tokens=budget, prefill_max_batch_size=limit, **options)
    waiting = queue_of([rng.randrange(1, 30) for _ in range(rng.randrange(1, 25))])
    next_id, head_age, head = len(waiting), 0, waiting[0].request_id
    for _ in range(60):
        while len(waiting) < 8:  # short ones keep coming: nobody may starve
            waiting.append(Request(str(next_id), Prompt([1] * rng.randrange(1, 3), SequenceParams())))
            next_id += 1
        costs = {int(request.request_id): len(request.tokens) for request in waiting}
        chosen = started(tested, waiting)
        assert chosen, "somebody can always start"
        assert chosen == sorted(chosen)
        assert len(chosen) <= limit
        assert sum(costs[i] for i in chosen) <= budget or len(chosen) == 1
        head_age = head_age + 1 if waiting and waiting[0].request_id == head else 0
        head = waiting[0].request_id if waiting else ""
        assert head_age <= 4 + 1, "the head of the queue starves"


def test_chunks_share_the_prompt_budget_with_new_requests() -> None:
    core = make_core(max_num_batched_tokens=64, prefill_max_tokens=8, prefix_caching=False)
    add(core, "long", [i % 50 for i in range(20)], max_tokens=3, ignore_eos=True)
    add(core, "short", [7] * 3, max_tokens=3, ignore_eos=True)
    run_dry(core)
    rows = [{row.request_id[:-2]: row.count for row in plan.rows} for plan in submitted(core)]
    assert rows[:4] == [{"long": 8}, {"long": 8}, {"long": 4, "short": 3}, {"long": 1, "short": 1}]


def test_cached_tokens_cost_nothing() -> None:
    core = make_core(prefill_max_tokens=4, enable_chunked_prefill=False)
    shared = [i % 50 for i in range(16)]
    add(core, "warm", shared, max_tokens=1)
    run_dry(core)
    steps = len(submitted(core))
    for i in range(4):
        add(core, str(i), shared, max_tokens=1)
    run_dry(core)
    assert [len(plan.rows) for plan in submitted(core)[steps:]] == [4]


def test_max_batch_size_decodes_in_turn() -> None:
    core = make_core(max_batch_size=2, max_num_seqs=5)
    for i in range(5):
        add(core, str(i), [i + 1, 2, 3], max_tokens=5, ignore_eos=True)
    done = run_dry(core)
    decodes = [[row.request_id for row in plan.rows if row.start >= 3] for plan in submitted(core)]
    assert max(map(len, decodes)) == 2
    first_ten = [name for names in decodes for name in names][:10]
    assert all(first_ten.count(f"{i}:0") == 2 for i in range(5))
    assert all(len(done[f"{i}:0"].tokens) == 5 for i in range(5))


def test_no_decode_first_gives_prompts_the_step() -> None:
    def decoding_rows(**options: object) -> list[int]:
        core = make_core(max_num_batched_tokens=6, prefix_caching=False, **options)
        for i in range(4):
            add(core, str(i), [i + 1], max_tokens=12, ignore_eos=True)
        core.step()
        add(core, "long", [i % 50 for i in range(20)], max_tokens=1)
        run_dry(core)
        plans = submitted(core)
        return [sum(row.request_id != "long:0" for row in p.rows) for p in plans[1:] if len(p.rows) > 1][:3]

    assert decoding_rows() == [4, 4, 4]
    assert decoding_rows(decode_first=False) == [1, 1, 1]


def test_prompts_that_cannot_start_take_no_tokens_from_decoding_requests() -> None:
    """Cases without decode_first: the head of the queue lacks blocks or a seat, or the step has few prompt tokens."""

    def decoding_rows(**options: object) -> list[int]:
        defaults = {"num_blocks": 23, "block_size": 1, "max_num_batched_tokens": 16, "prefix_caching": False}
        core = make_core(decode_first=False, max_model_len=100, **{**defaults, **options})
        for i in range(4):
            add(core, str(i), [i + 1], max_tokens=3, ignore_eos=True)
        core.step()
        add(core, "long", [i % 50 for i in range(20)], max_tokens=1)
        core.step()
        return [sum(row.start > 0 for row in plan.rows if row.request_id != "long:0") for plan in submitted(core)[1:]]

    assert decoding_rows() == [4]
    assert decoding_rows(num_blocks=64, max_active_requests=4) == [4]
    assert decoding_rows(num_blocks=64, prefill_max_tokens=8) == [4]
    assert decoding_rows(num_blocks=64) == [1], "it can start, so it does"


def test_forced_fifo_waits_for_a_step_in_which_somebody_can_start() -> None:
    pack = policy("pack", prefill_max_tokens=4, prefill_force_fifo_every=2, prefill_max_skips=0)
    waiting = queue_of([100] + [2] * 12)
    assert started(pack, waiting) == [1, 2]
    assert started(pack, waiting, seats=0) == []
    assert started(pack, waiting) == [0]


def test_pack_does_not_bet_on_samples_that_wait_for_their_prompt() -> None:
    """A preempted parent costs more than the budget, its fork next to nothing: the parent must start all the same."""
    options = {"prefill_max_tokens": 4, "prefill_max_skips": 0, "max_active_requests": 1}
    core = make_core(scheduling_policy="pack", block_size=16, **options)
    add(core, "a", [i % 50 for i in range(16)], max_tokens=12, n=2, ignore_eos=True)
    done: dict[str, Collected] = {}
    while len(done.get("a:0", Collected()).tokens) < 8:
        gather(core.step(), done)
    core.scheduler.roster.preempt(core.scheduler.running["a:0"])
    run_dry(core, done)
    assert [len(done[f"a:{i}"].tokens) for i in range(2)] == [12, 12]


def test_a_request_whose_last_token_is_on_its_way_takes_no_turn() -> None:
    core = make_core(max_batch_size=2, max_num_seqs=3, depth=2)
    for i, length in enumerate((2, 9, 9)):
        add(core, str(i), [i + 1], max_tokens=length, ignore_eos=True)
    run_dry(core)
    decodes = [[row.request_id for row in plan.rows] for plan in submitted(core)[1:]]
    assert [len(names) for names in decodes[:6]] == [2] * 6, "somebody else decodes in its place"


@pytest.mark.parametrize(
    "name",
    [
        "max_batch_size",
        "max_active_requests",
        "max_inflight_requests",
        "prefill_max_batch_size",
        "prefill_max_tokens",
        "prefill_admission_lookahead",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_limits_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        scheduler_config(scheduling_policy="pack", **{name: value})


def test_options_of_another_policy_are_refused() -> None:
    for name in ("prefill_admission_lookahead", "prefill_force_fifo_every", "prefill_max_skips"):
        with pytest.raises(ConfigError, match=f"{name} needs scheduling_policy pack"):
            scheduler_config(**{name: 8})
        with pytest.raises(ConfigError, match=name):
            scheduler_config(scheduling_policy="pack", **{name: -1})
    with pytest.raises(ConfigError, match="different policies"):
        SchedulerConfig(scheduling_policy="fifo", prefill_admission_policy="pack")
    assert SchedulerConfig(prefill_admission_policy="pack").policy_name == "pack"


def test_a_waiting_request_is_what_chunk_is_asked_about() -> None:
    request = queue_of([30])[0]
    decision = policy("fifo", prefill_max_tokens=8).begin(view_of([request]))
    assert decision.admit(request) is Verdict.ADMIT
    assert decision.chunk(request, 30) == 8
    request.status = Status.RUNNING
    assert decision.chunk(request, 30) == 0, "the step's tokens are spent"
