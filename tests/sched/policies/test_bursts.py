"""Steps are longer in a burst of prompts that nobody with objectives waits behind, on simulated time."""

from itertools import pairwise

import pytest

from roseinfer.core.config.engine import BURST_TOKENS
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import StepLimits
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.policies.common.bursts import MAX_FIXED_SHARE, MAX_STEP_S, QUIET_S
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.engine import SimulatedEngine
from roseinfer.sim.simulator import add_of
from roseinfer.sim.workload import Arrival

COST = CostParams(step_s=10e-3, token_s=20e-6, row_s=10e-6, context_s=20e-9)
BUDGET, BURST, PROMPT = 1024, 4096, 256


def prompts(count: int, at_s: float = 0.0, slo: Slo | None = None) -> list[Arrival]:
    """None begins like another, so that nothing is in the cache."""
    return [Arrival(at_s, [2 + number, int(100 * at_s)] * (PROMPT // 2), 4, slo) for number in range(count)]


def steps(arrivals: list[Arrival], cost: CostParams = COST, **options: object) -> list[tuple[float, int]]:
    """Return end and token count of each step, after a minute of a hundred small steps."""
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": BUDGET, "slack_burst_tokens": BURST, **options}
    engine = SimulatedEngine(scheduler_config(**settings), Machine(cost=cost, max_model_len=8192))
    found: list[tuple[float, int]] = []
    learning = [Arrival(0.6 * number, [1] * 8, 1) for number in range(100)]
    for number, arrival in enumerate([*learning, *arrivals]):
        at_s = arrival.at_s + (0 if number < 100 else 61.0)
        while engine.busy and engine.next_s < at_s:
            engine.step()
            found.append((engine.clock.now() - 61.0, engine.core.stats().step_tokens))
        engine.wake(at_s)
        engine.add(add_of(arrival, str(number), 8192), arrival.output_len)
    while engine.busy:
        engine.step()
        found.append((engine.clock.now() - 61.0, engine.core.stats().step_tokens))
    return found


def longest(found: list[tuple[float, int]]) -> int:
    return max(tokens for _, tokens in found)


def test_a_burst_is_computed_in_long_steps_and_sooner() -> None:
    arrivals = prompts(512)
    short, long = steps(arrivals, slack_burst_tokens=None), steps(arrivals)
    assert longest(short) == BUDGET and longest(long) == BURST
    assert long[-1][0] < 0.9 * short[-1][0]


def test_prompts_that_do_not_fill_a_long_step_are_no_burst() -> None:
    assert longest(steps(prompts(BURST // PROMPT - 1))) == BUDGET


def test_no_step_grows_while_somebody_has_objectives_nor_soon_after() -> None:
    promised = Slo(ttft_s=30.0, tpot_s=10.0)
    late_s = QUIET_S + 10
    arrivals = [*prompts(1, slo=promised), *prompts(64, 0.01), *prompts(64, late_s)]
    found = steps(arrivals)
    assert longest([step for step in found if step[0] < late_s]) <= BUDGET < longest(found)


@pytest.mark.parametrize("slower", [2, 3])
def test_no_step_is_longer_than_its_bound(slower: int) -> None:
    """The tokens of running requests are that far apart, and an arriving request with an objective waits that long."""
    cost = COST.slower(slower)
    found = steps(prompts(256), cost, slack_burst_tokens=1 << 16)
    durations = [later[0] - before[0] for before, later in pairwise(found) if later[1] > BUDGET]
    assert durations and max(durations) < 1.03 * MAX_STEP_S
    assert max(durations) > 0.9 * MAX_STEP_S


def test_a_step_is_no_longer_than_pays() -> None:
    """Behind which its fixed costs are a small share of it; where they are no large one, it does not grow."""
    cheap = CostParams(step_s=6e-3, token_s=20e-6, row_s=1e-6, context_s=0.0)
    pays = cheap.step_s / cheap.token_s * (1 / MAX_FIXED_SHARE - 1)
    assert BUDGET < 0.9 * pays < longest(steps(prompts(128), cheap)) < 1.1 * pays < BURST
    cheaper = CostParams(step_s=4e-3, token_s=20e-6, row_s=1e-6, context_s=0.0)
    assert cheaper.step_s / cheaper.token_s * (1 / MAX_FIXED_SHARE - 1) > 1.5 * BUDGET, "a little would be gained"
    assert longest(steps(prompts(128), cheaper)) == BUDGET


def test_steps_of_a_small_model_do_not_grow() -> None:
    """The host would need longer to launch one than the device to compute it."""
    small = CostParams(step_s=2e-3, token_s=2e-6, row_s=1e-6, context_s=0.0)
    assert small.step_s / small.token_s / MAX_FIXED_SHARE > BURST, "it would pay otherwise"
    assert longest(steps(prompts(128), small)) == BUDGET


def test_what_the_runner_is_made_for() -> None:
    config = scheduler_config(max_num_batched_tokens=512, slack_burst_tokens=4096)
    assert StepLimits.of(config, 8192).max_tokens == config.largest_step == 4096
    assert scheduler_config(max_num_batched_tokens=512, slack_burst_tokens=64).largest_step == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slack_burst_tokens": 0}, "slack_burst_tokens must be positive"),
        ({"slack_burst_tokens": 4096, "scheduling_policy": "fifo"}, "needs scheduling_policy slack, not fifo"),
        (
            {"slack_burst_tokens": 4096, "enable_chunked_prefill": False},
            f"{BURST_TOKENS} needs enable_chunked_prefill",
        ),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_config(**options)
