"""Agents on simulated time: a long system prompt with tools, and turns that repeat all before them."""

import random
from dataclasses import replace

from roseinfer.core.runner import StatePool, WindowPool
from roseinfer.priced.machine import Machine
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.engine import TOKEN
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases, each_value
from tests.sim.test_host_memory import COST

SYSTEM_TOKENS, TURNS, OUTPUT_TOKENS, RESULT_TOKENS = 20_000, 6, 150, 350


def turns(agents: int, *, reasoning: bool) -> tuple[list[Arrival], int]:
    """Return the turns of agents, each with tools of its own, and how many of their tokens an earlier one has computed.

    reasoning: the outputs are not in later prompts as they were, since these leave the reasoning out.
    """
    rng = random.Random(4)
    said = [[rng.randrange(3, 900) for _ in range(SYSTEM_TOKENS)] for _ in range(agents)]
    arrivals, repeated, computed = list[Arrival](), 0, [0] * agents
    for turn in range(TURNS):
        for agent in range(agents):
            repeated += computed[agent]
            prompt = said[agent] + [rng.randrange(3, 900) for _ in range(RESULT_TOKENS)]
            arrivals.append(Arrival(turn * 60.0 + agent, prompt, OUTPUT_TOKENS))
            said[agent] = prompt + [2 if reasoning else TOKEN] * (OUTPUT_TOKENS - 1)
            computed[agent] = len(prompt if reasoning else said[agent])
    return arrivals, repeated


@each_value(
    windows={
        "two_windows": (WindowPool(1024, 1200), WindowPool(128, 700)),
        "full": (),
        "window": (WindowPool(128, 400),),
    },
    reasoning=[False, True],
)
def test_turns_find_what_earlier_ones_have_computed(windows: tuple[WindowPool, ...], reasoning: bool) -> None:
    """The pools of windows are small: a prompt has 1,270 blocks, and three agents take turns."""
    arrivals, repeated = turns(3, reasoning=reasoning)
    machine = Machine(COST, max_model_len=32_768, num_blocks=6000, windows=windows)
    found = simulate(arrivals, scheduler_config(max_num_seqs=8, max_num_batched_tokens=2048), machine)
    assert all(life.served for life in found.lifetimes)
    assert found.stats.prefix_hits / repeated > 0.98


@cases("reasoning", [True], exhaustive=[False])
def test_agents_find_their_prefixes_while_other_requests_take_all_slots(reasoning: bool) -> None:
    """Chats fill the other slots, and nearly always one waits. Each leaves snapshots in the slots that are reserved."""
    agents, repeated = turns(3, reasoning=reasoning)
    rng = random.Random(5)
    chats = [Arrival(max(0.0, 0.8 * n - 50), [rng.randrange(3, 900) for _ in range(100)], 250) for n in range(500)]
    machine = Machine(replace(COST, step_s=0.12), max_model_len=32_768, num_blocks=12_000, states=StatePool(48, 0))
    config = scheduler_config(max_num_seqs=256, max_num_batched_tokens=2048)
    found = simulate(sorted(agents + chats, key=lambda arrival: arrival.at_s), config, machine)
    assert all(life.served for life in found.lifetimes)
    assert sum(life.ttft_s > 10.0 for life in found.lifetimes) > 0.9 * len(found.lifetimes), "nearly all wait"
    assert found.stats.prefix_hits / repeated > 0.98
