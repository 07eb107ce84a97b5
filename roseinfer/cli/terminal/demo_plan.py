"""Requests of `roseinfer demo`, with objectives derived from the measured speed of the machine.

Each kind has its own outcome on any machine. Easy objectives leave a multiple of what the idle machine takes. Surprises
say that their output is short, but their format makes it long: it cannot be written within the time that was promised.
Impossible ones ask for a first token in a fraction of the idle machine's time. A burst asks for more than fits at once.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, NamedTuple

CYCLE_S = 20.0
BURST_COUNT, SURPRISE_COUNT, IMPOSSIBLE_COUNT = 24, 3, 2
EASY_TOKENS, TIGHT_TOKENS, LONG_TOKENS = 32, 24, 200
# More characters than LONG_TOKENS tokens have.
LONG_FORMAT = {"structured_outputs": {"regex": "[a-z ]{1500}"}, "ignore_eos": False}
# Share of the idle machine's tokens that easy requests take, and limits of their rate per second.
EASY_SHARE = 0.25
MIN_EASY_RATE, MAX_EASY_RATE = 0.5, 6.0
TENANT = "x-llm-d-inference-fairness-id"
_WORDS = "add sort count merge split parse reverse filter group search round join".split()  # noqa: SIM905


class Speed(NamedTuple):
    """Time of a first token and of each further one, for one request on the idle machine."""

    ttft_s: float
    tpot_s: float


class DemoKind(StrEnum):
    EASY = "easy"
    SURPRISE = "surprise"
    BURST = "burst"
    IMPOSSIBLE = "impossible"


ANNOUNCEMENTS = {
    DemoKind.SURPRISE: f"{SURPRISE_COUNT} requests whose outputs are longer than they say: they will be late",
    DemoKind.BURST: f"{BURST_COUNT} requests at once, with tight promises",
    DemoKind.IMPOSSIBLE: f"{IMPOSSIBLE_COUNT} requests for a first token sooner than this machine can",
}


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """Request to send `at_s` seconds after the load began. `body`: without the model's name."""

    at_s: float
    kind: DemoKind
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def plan(speed: Speed, duration_s: float, seed: int) -> Iterator[DemoRequest]:
    """Yield the requests of a demo in order of arrival, cycle after cycle. The same arguments give the same ones."""
    rng = random.Random(seed)
    cycle_s = min(CYCLE_S, duration_s)
    for number in count():
        began_s = number * cycle_s
        if began_s >= duration_s:
            return
        requests = [*_easy(speed, began_s, cycle_s, rng), *_others(speed, began_s, cycle_s, rng)]
        yield from sorted((one for one in requests if one.at_s < duration_s), key=lambda one: one.at_s)


def probe(number: int) -> dict[str, Any]:
    """Return the body of a request that measures the speed."""
    return _body(_prompt(random.Random(f"probe {number}")), EASY_TOKENS)


def format_probe() -> dict[str, Any]:
    """Return the body of a request after which the server knows the format of surprises."""
    return {**probe(-1), **LONG_FORMAT}


def _easy(speed: Speed, began_s: float, cycle_s: float, rng: random.Random) -> Iterator[DemoRequest]:
    rate = min(max(EASY_SHARE / (speed.tpot_s * EASY_TOKENS), MIN_EASY_RATE), MAX_EASY_RATE)
    promised = {"ttft_ms": _ms(20 * speed.ttft_s), "tpot_ms": _ms(10 * speed.tpot_s)}
    at_s = rng.expovariate(rate)
    while at_s < cycle_s:
        yield DemoRequest(began_s + at_s, DemoKind.EASY, _body(_prompt(rng), EASY_TOKENS, promised))
        at_s += rng.expovariate(rate)


def _others(speed: Speed, began_s: float, cycle_s: float, rng: random.Random) -> Iterator[DemoRequest]:
    whole = {"e2e_ms": _ms(4 * speed.ttft_s + 80 * speed.tpot_s)}
    for number in range(SURPRISE_COUNT):
        said = {"pred_output_len": EASY_TOKENS // 2}
        body = {**_body(_prompt(rng), LONG_TOKENS, whole), **LONG_FORMAT, **said}
        # A tenant of its own: the server corrects what a tenant says by what it said before.
        headers = {TENANT: f"demo-{rng.getrandbits(32):08x}"}
        yield DemoRequest(began_s + (0.15 + 0.05 * number) * cycle_s, DemoKind.SURPRISE, body, headers)
    tight = {"ttft_ms": _ms(8 * speed.ttft_s), "tpot_ms": _ms(6 * speed.tpot_s)}
    for _ in range(BURST_COUNT):
        yield DemoRequest(began_s + 0.5 * cycle_s, DemoKind.BURST, _body(_prompt(rng), TIGHT_TOKENS, tight))
    for number in range(IMPOSSIBLE_COUNT):
        body = _body(_prompt(rng), TIGHT_TOKENS, {"ttft_ms": _ms(speed.ttft_s / 50)})
        yield DemoRequest(began_s + (0.75 + 0.05 * number) * cycle_s, DemoKind.IMPOSSIBLE, body)


def _body(prompt: str, tokens: int, objectives: dict[str, float] | None = None) -> dict[str, Any]:
    slo = {**(objectives or {}), "report": True}
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.7, "slo": slo}


def _prompt(rng: random.Random) -> str:
    """Return a prompt that shares no beginning with another."""
    names = "_".join(rng.choices(_WORDS, k=4))
    lines = "\n".join(f"# {rng.randrange(10**6)}: {' '.join(rng.choices(_WORDS, k=6))}" for _ in range(3))
    return f"# {rng.getrandbits(32):08x}\n{lines}\ndef {names}("


def _ms(seconds: float) -> float:
    return max(0.001, round(1000 * seconds, 3))
