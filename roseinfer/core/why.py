"""Why a request took as long as it did, as its engine saw it: plain data, made while it waits and runs."""

from typing import NamedTuple

from roseinfer.core.slo import Cause


class Forecast(NamedTuple):
    """What a policy expected of a request before it started, in seconds from its arrival to the first token and per
    token behind it; None: the policy expects nothing.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None


class Why(NamedTuple):
    """What one sequence has waited for so far, and how it has run.

    `waited`: seconds without a seat by what they were for, the longest first; times before it was sent to this engine
    count as `Cause.TRANSIT` or, if another one has had it, `Cause.ENGINE`. `chunks`: rows of its prompt, and those
    behind a preemption that computed several tokens again. `steps`: that the engine planned from its start on while it
    had a seat, up to its last token; in `sat_out` of them it computed nothing.
    """

    waited: tuple[tuple[Cause, float], ...] = ()
    forecast: Forecast = Forecast()
    chunks: int = 0
    steps: int = 0
    sat_out: int = 0
