"""What is known of a request that may go to one of several engines: where it is, and what a router is asked for it."""

from array import array
from dataclasses import dataclass
from math import inf

from roseinfer.core.slo import Rejection
from roseinfer.engine.api import GenerateRequest, Route
from roseinfer.kv.blocks import KEY_BYTES, block_keys
from roseinfer.router.base import Placement, RoutingRequest

_WORD_BYTES = 8


@dataclass(slots=True)
class RoutingState:
    """Of one live request. `losses`: engines that were lost under it; `blamed`: those of them that it may be to blame
    for. `route`: what others are told of it. `refusal`: of the engine that turned it away.
    """

    placement: Placement
    route: Route
    losses: int = 0
    blamed: int = 0
    refusal: Rejection | None = None

    @classmethod
    def new(cls, placement: Placement) -> "RoutingState":
        """Of one that has not been anywhere yet."""
        return cls(placement, Route(placement.engine, placement.reason))

    def record_loss(self, *, blamed: bool) -> None:
        """An engine is lost under it."""
        self.losses += 1
        self.blamed += blamed

    def move_to(self, placement: Placement, *, begun: bool, refused: bool) -> None:
        """It leaves the engine that it was in. `begun`: with tokens; `refused`: as that one turned it away."""
        route = self.route
        if begun:
            route.resumes += 1
        elif refused:
            route.retries += 1
        else:
            route.placed_again += 1
        self.placement = placement
        route.engine, route.reason = placement.engine, placement.reason


def prompt_block_keys(request: GenerateRequest, block_size: int) -> bytes:
    """The keys of the prompt's full KV blocks, as an engine computes them; empty if it cannot be, which whoever sends
    the request will say.
    """
    try:
        return b"".join(block_keys(request.prompt.ids, block_size, request.prompt.meta.cache_salt))
    except (TypeError, ValueError, OverflowError):
        return b""


def new_ask(request: GenerateRequest, keys: bytes, block_size: int, now_s: float) -> RoutingRequest:
    """For one that no engine has put anything out of. `now_s`: on the clock of its arrival."""
    meta = request.prompt.meta
    ttft_s = tpot_s = end_s = inf
    if meta.slo is not None:
        age_s = 0.0 if meta.arrival_s is None else now_s - meta.arrival_s
        ttft_s, tpot_s = _or_inf(meta.slo.ttft_s) - age_s, _or_inf(meta.slo.tpot_s)
        end_s = _or_inf(meta.slo.e2e_s) - age_s
    words = array("Q", keys)[:: KEY_BYTES // _WORD_BYTES].tolist()
    length = meta.predicted_len or 0
    return RoutingRequest(len(request.prompt.ids), words, block_size, length, ttft_s, tpot_s, end_s, request.n)


def _or_inf(objective_s: float | None) -> float:
    return inf if objective_s is None else objective_s


def resumed_ask(ask: RoutingRequest, said: int, samples: int) -> RoutingRequest:
    """For one of which `said` tokens are out already, and so many samples have not ended: these tokens are to be
    computed as well, and the next one is due now if anything was promised.
    """
    return ask._replace(
        prompt_tokens=ask.prompt_tokens + said,
        output_tokens=max(0.0, ask.output_tokens - said),
        ttft_left_s=0.0 if ask.has_objectives else inf,
        samples=samples,
    )
