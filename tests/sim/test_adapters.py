"""LoRA adapters on a simulated GPU: what they cost, and promises that count the wait for them."""

import random
from collections import Counter

import pytest

from roseinfer.cli.main import main
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Cause, Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.adapters import SimulatedAdapterConfig
from roseinfer.sim.autoscaling import simulate_fleet
from roseinfer.sim.fleet_plan import FleetPlan
from roseinfer.sim.simulator import SimulationResult, simulate
from roseinfer.sim.sweep import EstimatesFactory
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases
from tests.sim.test_six_classes import PLAIN, TTFT_TPOT_S

TTFT_TPOT_SLOS = [Slo(*objectives) for objectives in TTFT_TPOT_S]


def run(
    lora: SimulatedAdapterConfig,
    policy: str = "slack",
    *,
    rate: float = 24,
    seconds: float = 5.0,
    slos=TTFT_TPOT_SLOS,
    overlap: bool = False,
) -> SimulationResult:
    rng, arrivals, at_s = random.Random(0), list[Arrival](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        slo = rng.choice(slos)
        arrivals.append(Arrival(at_s, [5] * rng.randint(32, 1024), rng.randint(16, 512), slo))
    machine = Machine(PLAIN, num_blocks=20_000, prefix_caching=False, adapters=lora.machine)
    config = scheduler_config(scheduling_policy=policy, max_num_seqs=512, max_num_batched_tokens=2048, overlap=overlap)
    return simulate(lora.name(arrivals, 0), config, machine, estimates=Estimates(cost=CostModel(PLAIN)))


def kept(result: SimulationResult) -> list[bool]:
    return [life.good for life in result.lifetimes]


def test_adapters_that_all_fit_cost_their_loads_only() -> None:
    """The first requests wait for reads from disk."""
    none, all_fit = (run(SimulatedAdapterConfig(adapters=count), seconds=3.0) for count in (0, 8))
    assert all(kept(none)) and sum(kept(all_fit)) >= len(kept(all_fit)) - 8
    assert all_fit.stats.adapters.loads == all_fit.stats.adapters.reads == 8


@cases("policy", ["slack"], exhaustive=["scorpio"])
def test_a_promise_counts_the_wait_for_a_slot(policy: str) -> None:
    """Twelve adapters do not fit; requests for them are rejected for that, and no accepted request is late."""
    result = run(SimulatedAdapterConfig(adapters=20), policy)
    causes = Counter(life.rejection.cause for life in result.lifetimes if life.rejection)
    assert causes["adapter"] > 10
    if policy == "slack":
        assert set(causes) == {"adapter"}
        assert not [life for life in result.lifetimes if life.served and not life.good]


@cases("overlap", [True], exhaustive=[False])
def test_more_adapters_than_slots_keep_slow_objectives(overlap: bool) -> None:
    """Steps are several times as fast as the objectives: adapters take turns, and no accepted request is late."""
    lora = SimulatedAdapterConfig(adapters=12, adapter_zipf=0.0, lora_slots=6)
    result = run(lora, slos=[Slo(2.0, 0.03), Slo(2.0, 0.05)], overlap=overlap)
    good = kept(result)
    assert sum(good) > 0.9 * len(good)
    assert not [life for life in result.lifetimes if life.served and not life.good]
    assert {life.rejection.cause for life in result.lifetimes if life.rejection} <= {Cause.ADAPTER}
    assert result.stats.adapters.loads > 100 and result.stats.policy_stalls == 0


@cases("policy", ["fifo", "slack"], exhaustive=["pack", "sarathi", "qoserve", "scorpio"])
def test_requests_without_objectives_all_finish(policy: str) -> None:
    lora = SimulatedAdapterConfig(adapters=9, adapter_zipf=0.0, lora_slots=2, lora_host_size=0.2)
    result = run(lora, policy, slos=[None], seconds=2.0)
    assert all(life.served for life in result.lifetimes)
    assert result.stats.adapters.evictions >= 7 and result.stats.adapters.host_bytes <= 0.2 * 2**30


def test_popularity() -> None:
    lora = SimulatedAdapterConfig(adapters=20, adapter_share=0.5)
    named = lora.name([Arrival(0.0, [5], 1)] * 4000, 0)
    counts = Counter(arrival.adapter and arrival.adapter.name for arrival in named)
    assert counts[None] == pytest.approx(2000, rel=0.1)
    assert counts["adapter-1"] == pytest.approx(2 * counts["adapter-2"], rel=0.2)
    assert named == lora.name(named, 0) != lora.name(named, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"adapters": -1}, {"adapter_zipf": -1.0}, {"adapter_share": 0.0}, {"adapter_share": 2.0}, {"lora_slots": 0}],
)
def test_wrong_options(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SimulatedAdapterConfig(**wrong)


def test_simulate_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--adapters", "9", "--lora-slots", "8", "--lora-bytes", "1000000", "--lora-load-rate", "10"]
    assert main(["simulate", "--num-requests", "12", "--request-rate", "50", *options]) == 0
    alone = capsys.readouterr().out
    assert "requests" in alone
    comparison = ["--setup", "scorpio-8b", "--policies", "slack", "--rates", "4", "--num-requests", "20", "--jobs", "1"]
    assert main(["simulate", *comparison, *options]) == 0


def test_a_router_prefers_engines_with_the_adapter() -> None:
    """Two engines have slots for six adapters each, so together for all twelve. Steps are too slow to share slots."""
    lora = SimulatedAdapterConfig(adapters=12, adapter_zipf=0.5, lora_slots=6)
    rng = random.Random(0)
    arrivals = [Arrival(0.04 * number, [5] * 100, rng.randint(16, 256), Slo(0.5, 0.011)) for number in range(90)]
    machine = Machine(PLAIN, num_blocks=20_000, prefix_caching=False, adapters=lora.machine)
    config, knowledge, good = scheduler_config(max_num_seqs=64), EstimatesFactory(machine, "none"), {}
    for router in ("pace", "round-robin"):
        fleet = simulate_fleet(lora.name(arrivals, 0), config, machine, FleetPlan(2, router), knowledge, 0)
        good[router] = sum(life.good for life in fleet.simulation.lifetimes)
    assert good["pace"] == 90 > good["round-robin"]
