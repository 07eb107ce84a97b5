"""Capacity report that an engine publishes at every step, from which a router estimates what the engine can promise."""

from math import inf
from typing import NamedTuple

from roseinfer.core.step_cost import StepCost

# Upper bounds of the buckets of `Promise.waiting_tokens`: seconds from `at_s` to the deadline of the first token.
DUE_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, inf)
# Adapters whose place an engine publishes; it writes a promise per step, so they are few.
MAX_DEVICE_ADAPTERS_COUNT, MAX_HOST_ADAPTERS_COUNT = 16, 32
PROMPT_SPAN_S = 10.0  # time constant of `Promise.prompt_share`


class Promise(NamedTuple):
    """State of an engine as of the step that begins at `at_s`, published before that step runs.

    `at_s`: when the step began, on the monotonic clock of the engine's machine. Idle engines publish too. `step_s`:
    expected duration of the step, 0 = idle or unknown. `steps`: number of steps begun since the engine started.

    `cost`: at the present speed of the machine. `experts`: experts that a step reads at present, 0 = none.

    `usable_share`: share of each TPOT objective that the policy plans with (1 - margin). `smallest_s`: smallest TPOT
    objective of the running requests, inf = none. `busy`: machine seconds per second that the objectives of decoding
    rows need, the sum of (per row + per context token * L) / TPOT. `weights`: the same for requests that prefill or
    wait. `arriving`: recent share of the machine's time taken by prompts.

    `fill_tokens`: prompt tokens left of running requests. `waiting_tokens`: uncached prompt tokens of waiting requests
    by deadline (buckets `DUE_S`); requests without a TTFT objective are in the last bucket. `output_tokens`: expected
    length of an output that has no prediction, 0 = unknown.

    `running`, `waiting`, `best_effort`: numbers of requests; `best_effort` counts waiting requests without objectives.
    `growth_blocks`: blocks that all present requests, waiting ones included, are expected to take yet. `blocks`: size
    of the KV cache, 0 = unknown. `free_blocks`: as many as if all of its pools were as full as the fullest.
    `draining`: the engine accepts no new requests.

    `oldest_wait_s`: seconds since the arrival of the oldest request without a first token, whether it waits or its
    prompt is being computed; 0 = none. `prompt_share`: recent share of the time that prompts took, 0 to about 1, with
    the time constant `PROMPT_SPAN_S`. Steps are split between prompts and decoding by their tokens.

    `device_adapters`, `host_adapters`: keys (`adapter_key`) of LoRA adapters in slots and in host memory, the most
    recently used first, then zeros. `adapter_load_s_per_byte`: time of a copy to a slot. `adapter_read_s_per_byte`:
    that of a read from disk. `adapter_slot_wait_s`: time until a slot is free for one more adapter.
    """

    at_s: float
    step_s: float = 0.0
    steps: int = 0
    cost: StepCost = StepCost()
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
    experts: float = 0.0
    oldest_wait_s: float = 0.0
    prompt_share: float = 0.0
    device_adapters: tuple[int, ...] = (0,) * MAX_DEVICE_ADAPTERS_COUNT
    host_adapters: tuple[int, ...] = (0,) * MAX_HOST_ADAPTERS_COUNT
    adapter_load_s_per_byte: float = 0.0
    adapter_read_s_per_byte: float = 0.0
    adapter_slot_wait_s: float = 0.0

    @property
    def constant_s(self) -> float:
        """Return the constant cost of a step at present, experts included."""
        return self.cost.step_s + self.cost.expert_s * self.experts

    def adapter_s(self, key: int, num_bytes: int) -> float:
        """Return the seconds until a new request could use an adapter. `num_bytes`: size of the adapter."""
        if key in self.device_adapters:
            return 0.0
        read_s = 0.0 if key in self.host_adapters else num_bytes * self.adapter_read_s_per_byte
        return max(self.adapter_slot_wait_s, read_s) + num_bytes * self.adapter_load_s_per_byte
