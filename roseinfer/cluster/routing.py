"""Routing state of a request, and the questions that a router answers for it."""

from array import array
from dataclasses import dataclass
from math import inf

from roseinfer.core.adapters import adapter_key
from roseinfer.core.slo import Rejection
from roseinfer.engine.api import GenerateRequest, Route
from roseinfer.kv.blocks import KEY_BYTES, block_keys
from roseinfer.router.base import Placement, RoutingRequest

_WORD_BYTES = 8


@dataclass(slots=True)
class RoutingState:
    """Routing state of one live request. `losses`: engines it has lost; `blamed`: those that it may have crashed.
    `route`: its public path. `refusal`: rejection of the first engine. `left_queue`: it has left an engine because it
    waited there too long, which happens once.
    """

    placement: Placement
    route: Route
    losses: int = 0
    blamed: int = 0
    refusal: Rejection | None = None
    left_queue: bool = False

    @classmethod
    def new(cls, placement: Placement) -> "RoutingState":
        """Return the state of a new request."""
        return cls(placement, Route(placement.engine, placement.reason))

    def record_loss(self, *, blamed: bool) -> None:
        """Count a lost engine."""
        self.losses += 1
        self.blamed += blamed

    def move_to(self, placement: Placement, *, begun: bool, rejected: bool) -> None:
        """Record a move. `begun`: with output; `rejected`: the last engine rejected it."""
        route = self.route
        if begun:
            route.resumes += 1
        elif rejected:
            route.retries += 1
        else:
            route.placed_again += 1
        self.placement = placement
        route.engine, route.reason = placement.engine, placement.reason


def prompt_block_keys(request: GenerateRequest, block_size: int) -> bytes:
    """Return the keys of the prompt's full KV blocks as an engine computes them; empty for an invalid prompt, which is
    reported when it is sent.
    """
    try:
        return b"".join(block_keys(request.prompt.ids, block_size, request.prompt.meta.prefix_scope))
    except (TypeError, ValueError, OverflowError):
        return b""


def new_ask(request: GenerateRequest, keys: bytes, block_size: int, now_s: float) -> RoutingRequest:
    """Return the question for a request without output. `now_s`: on the clock of its arrival."""
    meta = request.prompt.meta
    ttft_s = tpot_s = end_s = inf
    if meta.slo is not None:
        age_s = 0.0 if meta.arrival_s is None else now_s - meta.arrival_s
        ttft_s, tpot_s = _or_inf(meta.slo.ttft_s) - age_s, _or_inf(meta.slo.tpot_s)
        end_s = _or_inf(meta.slo.e2e_s) - age_s
    words = array("Q", keys)[:: KEY_BYTES // _WORD_BYTES].tolist()
    length = meta.predicted_len or 0
    adapter = (0, 0) if meta.adapter is None else (adapter_key(meta.adapter.digest), meta.adapter.num_bytes)
    return RoutingRequest(
        len(request.prompt.ids), words, block_size, length, ttft_s, tpot_s, end_s, request.n, *adapter
    )


def _or_inf(objective_s: float | None) -> float:
    return inf if objective_s is None else objective_s


def resumed_ask(ask: RoutingRequest, said: int, samples: int) -> RoutingRequest:
    """Return the question for a request with `said` output tokens and open samples.

    The new engine computes these tokens again. The next one is due now if there are objectives.
    """
    return ask._replace(
        prompt_tokens=ask.prompt_tokens + said,
        output_tokens=max(0.0, ask.output_tokens - said),
        ttft_left_s=0.0 if ask.has_objectives else inf,
        samples=samples,
    )
