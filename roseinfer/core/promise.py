"""What an engine says of itself in every step, so that a router can tell what it could still promise to a request."""

from math import inf
from typing import NamedTuple

# Upper bounds of the buckets of `Promise.waiting_tokens`: seconds from `at_s` until a first token is due.
DUE_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, inf)


class Promise(NamedTuple):
    """An engine's state as of the step that begins at `at_s`, published before that step runs.

    `at_s`: when the step began, on the monotonic clock of the engine's machine; an idle engine publishes too. `step_s`:
    how long the step is expected to take, 0 = idle or unknown. `steps`: how many were begun, ever.

    Cost, in seconds and with the present speed of the machine: `cost_s` of any step, per prompt token, per decoding
    row, per context token of such a row. All 0: the policy fits no cost model.

    `usable_share`: the share of TPOT objectives that is planned with (1 - margin). `smallest_s`: the smallest TPOT objective of
    those that decode or fill; inf = none. `busy`: seconds of the machine a second that the objectives of decoding rows
    ask for, the sum of (per row + per context token * L) / TPOT; `weights`: the same of those that fill or wait.
    `arriving`: the share of the machine that prompts have taken lately.

    `fill_tokens`: prompt tokens left of the requests that run. `waiting_tokens`: uncached prompt tokens of those that
    wait, by when they are due (`DUE_S`); those without a TTFT objective are in the last. `output_tokens`: what an
    output is expected to have if nobody has guessed; 0 = unknown.

    `running`, `waiting`, `best_effort`: requests; the last are those of the waiting ones that were promised nothing.
    `free_seats`, `free_blocks`: what is free; `growth_blocks`: what the requests that are there are expected to take
    yet, those that wait included; `blocks`: of the KV cache in all, 0 = unknown.
    `draining`: it takes no more requests.
    `expert_s`: seconds per expert that a step reads, `experts`: how many of them one reads at present; 0 = it has none.
    """

    at_s: float
    step_s: float = 0.0
    steps: int = 0
    cost_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    usable_share: float = 1.0
    smallest_s: float = inf
    busy: float = 0.0
    weights: float = 0.0
    arriving: float = 0.0
    fill_tokens: int = 0
    waiting_tokens: tuple[int, ...] = (0,) * len(DUE_S)
    output_tokens: float = 0.0
    running: int = 0
    waiting: int = 0
    best_effort: int = 0
    free_seats: int = 0
    free_blocks: int = 0
    growth_blocks: int = 0
    blocks: int = 0
    draining: bool = False
    expert_s: float = 0.0
    experts: float = 0.0

    @property
    def constant_s(self) -> float:
        """What a step costs at present, whatever it holds."""
        return self.cost_s[0] + self.expert_s * self.experts
