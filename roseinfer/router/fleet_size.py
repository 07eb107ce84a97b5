"""Autoscaling rule: the number of engines, from their load and the rejected requests."""

from dataclasses import dataclass
from math import ceil, exp, floor

from roseinfer.core.promise import PROMPT_SPAN_S, Promise

MIN_REQUESTS_COUNT = 20  # with objectives in the window; fewer are too few to judge the rejected share
MIN_CAPACITY_SHARE = 0.13  # of its time, which an engine always has for work
MAX_WAIT_S = 2.0  # for a first token; older requests say that the engine cannot keep up
# Bounds the effect of a burst: a queue that is gone within a fifth of the window does not add an engine.
MAX_QUEUE_RATIO = 4.0


@dataclass(frozen=True, slots=True)
class FleetSizeRule:
    """Bounds and thresholds of the number of engines.

    Scale up if, over the last `window_s` seconds, the rejected requests that an idle engine could have served exceed
    `max_rejected_share` of those with objectives, or the mean `fullness` exceeds `high_load`; the new size brings
    it to `target_load`. Remove one engine if that of the rest would stay below `low_load` for `patience_s` seconds, but
    never while requests wait.
    """

    min_engines: int
    max_engines: int
    window_s: float = 60.0
    max_rejected_share: float = 0.01
    high_load: float = 0.85
    target_load: float = 0.75
    low_load: float = 0.65
    patience_s: float = 600.0


def fullness(promise: Promise, now_s: float) -> float:
    """Return how full an engine is: 0 = idle, 1 = full, above 1 = its requests need more than one engine.

    The largest of five shares, of which the last two have no upper bound of 1:

    - seats: running requests over all seats, 0 to 1;
    - memory: KV blocks in use over all blocks, 0 to 1;
    - prompts: `prompt_share`, 0 to about 1, which decays until `now_s`, since an idle engine publishes nothing new;
    - objectives: `promised_load`, for policies that publish one, else 0;
    - queue: (running + waiting) / running, the engines that would run all of them at once. It counts in proportion to
      the age of the oldest request without a first token, in full from `MAX_WAIT_S` on, and up to `MAX_QUEUE_RATIO`.
    """
    seats = promise.running / max(1, promise.running + promise.free_seats)
    memory = (promise.blocks - promise.free_blocks) / max(1, promise.blocks)
    queue = (promise.running + promise.waiting) / max(1, promise.running)
    age = min(1.0, promise.oldest_wait_s / MAX_WAIT_S)
    prompts = promise.prompt_share * exp((promise.at_s - now_s) / PROMPT_SPAN_S)
    return max(seats, memory, prompts, promised_load(promise), age * min(queue, MAX_QUEUE_RATIO))


def promised_load(promise: Promise) -> float:
    """Return the demand of objectives on an engine over its capacity at its tightest TPOT objective; 1 = full.

    The constant cost of steps is part of neither. It does not depend on the number of requests, so a larger fleet would
    only pay it more often.
    """
    pace = promise.constant_s / promise.smallest_s
    return (promise.busy + promise.weights + promise.arriving) / max(MIN_CAPACITY_SHARE, promise.usable_share - pace)


def too_many_rejections(rule: FleetSizeRule, with_objectives: float, rejected: float) -> bool:
    """Return True if the share of rejected requests in the window exceeds the rule's limit."""
    return with_objectives >= MIN_REQUESTS_COUNT and rejected > rule.max_rejected_share * with_objectives


@dataclass(frozen=True, slots=True)
class FleetState:
    """State of a fleet at `at_s`: engines `running` and `starting`.

    `load`: mean `fullness` of the engines over the window. `too_many_rejections`: see the function. `waiting`: requests
    that wait for a seat now.
    """

    at_s: float
    running: int
    starting: int
    load: float
    too_many_rejections: bool
    waiting: int = 0


def fleet_size(rule: FleetSizeRule, fleet: FleetState, low_since_s: float | None) -> tuple[int, float | None]:
    """Return the wanted number of engines, including starting ones, and since when fewer would do.

    The second value is None if fewer would not do; pass it as `low_since_s` to the next call.
    """
    size = fleet.running + fleet.starting
    if fleet.load > rule.high_load or fleet.too_many_rejections:
        wanted = ceil(fleet.running * fleet.load / rule.target_load)
        if fleet.too_many_rejections and not fleet.starting:
            wanted = max(wanted, size + 1)
        return min(rule.max_engines, max(size, wanted)), None
    load_sum = fleet.load * fleet.running
    if fleet.starting or size <= rule.min_engines or load_sum >= rule.low_load * (fleet.running - 1):
        return size, None
    low_since_s = fleet.at_s if low_since_s is None else low_since_s
    is_due = floor(fleet.at_s - low_since_s) >= rule.patience_s and not fleet.waiting
    return (size - 1 if is_due else size), low_since_s
