"""Claims of clients that cannot be checked beforehand: the output's length, its urgency, and its tenant."""

from dataclasses import replace

import pytest

from roseinfer.core.request import Prompt, Request, RequestMeta, Status
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policies.slack.requests import SlackTrack
from roseinfer.sched.policy import Queued
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.arrivals import make_arrivals
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.simulator import Lifetime, simulate
from tests.sched.policies.slack.test_slack import state


def adherence(lives: list[Lifetime]) -> float:
    return sum(life.good for life in lives) / len(lives)


def marked(
    rate: float, seed: int, factor: float, share: int = 5, requests: int = 500
) -> tuple[list[Lifetime], list[Lifetime]]:
    """Simulate the published load with clients' hints. Return the requests of a tenant with false hints, and the rest.

    Every `share`th request is that tenant's, whose hints are `factor` times those of a predictor.
    """
    work = WorkloadConfig(setup="scorpio-8b", num_requests=requests, request_rate=rate, seed=seed)
    arrivals = []
    for number, arrival in enumerate(make_arrivals(work, SCORPIO_8B)):
        assert arrival.predicted_len is not None
        said = arrival.predicted_len if number % share else max(1, int(factor * arrival.predicted_len))
        tenant = "honest" if number % share else "liar"
        arrivals.append(replace(arrival, predicted_len=said, hinted=True, tenant=tenant))
    run = simulate(arrivals, scheduler_config(**SCORPIO_8B.scheduler), SCORPIO_8B.machine)
    return run.lifetimes[::share], [life for i, life in enumerate(run.lifetimes) if i % share]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rate", "factor"), [(11.0, 0.1), (15.0, 0.01)])
def test_a_short_hint_buys_next_to_nothing(rate: float, factor: float) -> None:
    """The same requests with honest hints, over three seeds: at most 5 points of adherence more, and the long ones
    among them, which would gain most, at most 10.
    """
    gained, long_gained = [], []
    for seed in (0, 1, 2):
        lies, honest = marked(rate, seed, factor)[0], marked(rate, seed, 1.0)[0]
        gained.append(adherence(lies) - adherence(honest))
        shortest = sorted(life.output_len for life in lies)[2 * len(lies) // 3]
        both = [[life for life in lives if life.output_len >= shortest] for lives in (lies, honest)]
        long_gained.append(adherence(both[0]) - adherence(both[1]))
    assert sum(gained) / 3 <= 0.05, gained
    assert sum(long_gained) / 3 <= 0.10, long_gained


def test_a_short_hint_buys_little_in_a_short_run() -> None:
    """A smoke test of the above: 20 requests of 100 decide, so the bound is wider."""
    lies, honest = (marked(11.0, 0, factor, requests=100)[0] for factor in (0.1, 1.0))
    assert adherence(lies) - adherence(honest) <= 0.08


def test_predictions_of_the_server_are_trusted_as_before() -> None:
    """Their errors do not matter, since no client gains from them."""
    work = WorkloadConfig(setup="scorpio-8b", num_requests=60, request_rate=13.0, seed=0)
    arrivals = make_arrivals(work, SCORPIO_8B)
    hints = [replace(arrival, hinted=True) for arrival in arrivals]
    config = scheduler_config(**SCORPIO_8B.scheduler)
    served, hinted = (simulate(each, config, SCORPIO_8B.machine).lifetimes for each in (arrivals, hints))
    assert abs(adherence(hinted) - adherence(served)) < 0.05


class NewHere(OracleLengths):
    """Estimator that cannot judge hints yet."""

    def known(self, request: Request) -> bool:
        return False


def outlived(made, *, hinted: bool, outputs: int = 70, waiting: bool = True) -> Request:
    """A request that said 10 tokens and has more, while another waits and the price limit is that of 50 tokens."""
    request = made.run("short", predicted=10, hinted=hinted, tenant="liar", tpot_s=0.050)
    made.begin()
    request.tokens += [1] * outputs
    request.planned = request.computed = len(request.tokens) - 1
    made.policy.state.price.limit_s = 0.050
    if waiting:
        made.wait("next", 10, ttft_s=9.0, tpot_s=0.050)
    made.now_s = 1.0
    made.begin()
    return request


@pytest.mark.parametrize("options", [{"hinted": False}, {"hinted": True, "waiting": False}])
def test_who_was_mispredicted_or_takes_nothing_from_others_keeps_its_objective(options) -> None:
    made = state(lengths=NewHere())
    outlived(made, **options)
    assert not made.policy.state.unpromised


def test_what_a_source_proved_worth_is_in_the_expected_length_already() -> None:
    made = state()
    outlived(made, hinted=True)
    assert not made.policy.state.unpromised


def test_a_hint_that_is_a_little_short_is_forgiven() -> None:
    made = state(lengths=NewHere())
    outlived(made, hinted=True, outputs=40)
    assert not made.policy.state.unpromised


@pytest.mark.parametrize("objectives", [{}, {"ttft_s": 1.0}, {"tpot_s": 0.050}])
def test_a_tenant_pays_for_its_outputs_whatever_was_promised(objectives: dict[str, float]) -> None:
    made = state()
    made.run("a", tenant="long", predicted=500, **objectives)
    made.run("b", tenant="short", predicted=5, **objectives)
    assert made.policy.state.tenants.excess("long", 0.0) > 0.5


def key_of(track: SlackTrack) -> float:
    """Return the key by which a waiting request is sorted."""
    assert track.place is not None
    return track.place[0]


def test_a_preempted_request_that_outlived_its_hint_waits_at_its_true_price() -> None:
    made = state(lengths=NewHere())
    keys = {}
    for name, outputs in (("kept", 5), ("outlived", 60)):
        request = made.run(name, predicted=10, hinted=True, tpot_s=0.050)
        request.tokens += [1] * (outputs - 1)
        made.running.remove(request)
        request.status, request.seat, request.preemptions = Status.WAITING, None, 1
        made.policy.observe(Queued(request))
        track = made.policy.state.ledger.waiting[name]
        keys[name] = (track.length, key_of(track) - made.policy.state.tuning.cost_weight * 0.001 * len(request.tokens))
    assert keys["kept"][0] == 10 and keys["outlived"][0] > 60
    assert keys["outlived"][1] > keys["kept"][1] + 4 * 0.050, "some 50 tokens of 1 ms, four times"


@pytest.mark.parametrize(("asked", "levels"), [(-3, -3), (4, 4), (-(2**63), -10), (2**63 - 1, 10), (-11, -10)])
def test_a_priority_buys_ten_seconds_at_most(asked: int, levels: int) -> None:
    made = state(lengths=NewHere())

    def key(priority: int) -> float:
        name = f"{priority}"
        meta = RequestMeta(arrival_s=0.0, slo=Slo(2.0, 0.05), priority=priority, predicted_len=10)
        request = Request(name, Prompt([1] * 10, SequenceParams(max_tokens=100), meta))
        made.policy.observe(Queued(request))
        return key_of(made.policy.state.ledger.waiting[name])

    assert key(asked) - key(0) == pytest.approx(levels * 1.0)
