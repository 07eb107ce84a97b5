"""Load for priced engines: the simulator's requests, sent over HTTP when they are due, and what is seen of them."""

import argparse
import asyncio
import gc
import json
import re
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

from roseinfer.bench.exchange import Exchange, exchange
from roseinfer.bench.open_loop import READ_BUFFER_BYTES
from roseinfer.bench.report import percentile
from roseinfer.core.slo import Slo
from roseinfer.priced.drawn import drawn_length, key_of, length_of_draw
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sim.setups import Setup
from roseinfer.sim.workload import Arrival, gamma

PATIENCE_S = 300.0
SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


@dataclass(slots=True)
class Seen(Exchange):
    """What became of one request with these objectives, at its client."""

    slo: Slo | None

    @property
    def good(self) -> bool:
        """It ended well and kept its objectives."""
        if not self.ok or not self.chunk_s or self.error is not None:
            return False
        return self.slo is None or not self.slo.missed(self.ttft_s, self.tpot_s, self.latency_s)

    @property
    def failed(self) -> bool:
        """It neither ended well nor was refused because its objectives were out of reach."""
        return not (self.ok and self.error is None) and self.status != 429


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to be sent. `body` is encoded before it is due."""

    at_s: float
    body: bytes
    slo: Slo | None = None


def seed_for(prompt_ids: Sequence[int], output_len: int, mean_len: float) -> int:
    """The first seed with which a priced engine's output has this length: so nothing in the request gives it away.

    About as many seeds are tried as the length is unlikely under a geometric law of this mean.
    """
    prompt = array("I", prompt_ids).tobytes()
    least, most = _draws(output_len, mean_len)
    seed = 0
    while not least <= crc32(b"length", crc32(prompt, crc32(seed.to_bytes(8, "little", signed=True)))) <= most:
        seed += 1
    assert drawn_length(key_of(seed, prompt_ids), mean_len) == output_len, "the law is not the engine's"
    return seed


@cache
def _draws(output_len: int, mean_len: float) -> tuple[int, int]:
    """The least and the largest of the 32 random bits that give this length, by bisection: longer ones have less.

    Raises ValueError if none do.
    """

    def fewer(length: int) -> int:
        """How many draws give more than `length`."""
        low, high = 0, 2**32
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if length_of_draw(middle, mean_len) > length else (low, middle)
        return low

    least, most = fewer(output_len), fewer(output_len - 1) - 1
    if least > most:
        raise ValueError(f"no output has {output_len} tokens where the mean is {mean_len:g}")
    return least, most


def arrivals_of(setup: Setup, rate: float, count: int, seed: int, cv: float = 1.0, scale: float = 1.0) -> list[Arrival]:
    """What the simulator draws for a setup, with lengths told by clients, as nobody else could over HTTP.

    `scale`: all times are so many times as long: gaps and objectives (and, by `scaled`, the machine's steps).
    """
    drawn = setup.mix.requests(gamma(rate, count, seed, cv), seed)
    return [
        replace(each, at_s=each.at_s * scale, slo=_scaled_slo(each.slo, scale), hinted=each.predicted_len is not None)
        for each in drawn
    ]


def _scaled_slo(slo: Slo | None, scale: float) -> Slo | None:
    if slo is None:
        return None
    times = {name: getattr(slo, name) for name in ("ttft_s", "tpot_s", "e2e_s")}
    return replace(slo, **{name: value * scale for name, value in times.items() if value is not None})


def scaled(setup: Setup, scale: float) -> Setup:
    return replace(setup, machine=replace(setup.machine, cost=setup.machine.cost.slower(scale)))


def write_cost(setup: Setup, path: Path) -> Path:
    path.write_text(json.dumps(cost_as_json(setup.machine.cost)))
    return path


def machine_options(setup: Setup, cost: Path, mean_len: float) -> list[str]:
    """Flags of `serve` for engines like the setup's machine, of which policies know the cost, as in the simulator."""
    machine = setup.machine
    flags = ["--device", "priced", "--cost", str(cost), "--cost-model", str(cost), "--noise", str(machine.noise)]
    flags += ["--max-model-len", str(machine.max_model_len), "--num-kv-blocks", str(machine.num_kv_blocks)]
    flags += ["--block-size", str(machine.block_size), "--mean-output-len", str(mean_len)]
    flags += [] if machine.prefix_caching else ["--no-enable-prefix-caching"]
    for name, value in setup.scheduler.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def planned(arrivals: Sequence[Arrival], context: int, mean_len: float) -> list[Planned]:
    """Chat-free completions of token ids, which say no more of their outputs than the simulator's requests do."""
    return [Planned(each.at_s, json.dumps(_body(each, context, mean_len)).encode(), each.slo) for each in arrivals]


def _body(arrival: Arrival, context: int, mean_len: float) -> dict[str, Any]:
    prompt = list(arrival.prompt_ids)
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max(context - len(prompt), arrival.output_len),
        "seed": seed_for(prompt, arrival.output_len, mean_len),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if arrival.predicted_len is not None:
        body["pred_output_len"] = arrival.predicted_len
    if arrival.slo is not None:
        told = {"ttft_ms": arrival.slo.ttft_s, "tpot_ms": arrival.slo.tpot_s, "e2e_ms": arrival.slo.e2e_s}
        body["slo"] = {name: 1e3 * seconds for name, seconds in told.items() if seconds is not None}
    return body


async def put(
    url: str,
    load: Sequence[Planned],
    *,
    texts: bool = False,
    delay_s: float = 0.1,
    meanwhile: Callable[[float], Awaitable[None]] | None = None,
) -> list[Seen]:
    """All of a load, each request when it is due. `texts`: keep what they say. `meanwhile(began_s)` runs beside it and
    is told when the load began, on the monotonic clock: after `delay_s`.
    """
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES) as session:
        gc.collect()
        gc.freeze()
        began_s = time.monotonic() + delay_s
        try:
            beside = None if meanwhile is None else asyncio.ensure_future(meanwhile(began_s))
            found = list(await asyncio.gather(*(_send(session, url, each, began_s, texts) for each in load)))
            if beside is not None:
                await beside
            return found
        finally:
            gc.unfreeze()


async def _send(session: Any, url: str, request: Planned, began_s: float, texts: bool) -> Seen:
    seen = Seen(request.slo, due_s=request.at_s)
    headers = {"Content-Type": "application/json"}
    await exchange(session, f"{url}/v1/completions", request.body, headers, seen, began_s, texts=texts)
    return seen


def adherence(seen: Sequence[Seen]) -> float:
    """Good ones of all, refused ones included."""
    return fmean(each.good for each in seen) if seen else float("nan")


def summary(seen: Sequence[Seen]) -> dict[str, Any]:
    """`late ms`: how much too late the client sent them, 99th percentile; if that is much, nothing else is of use."""
    served = [each for each in seen if each.ok and each.chunk_s]
    return {
        "requests": len(seen),
        "adherence": adherence(seen),
        "refused": sum(each.status == 429 for each in seen),
        "failed": sum(each.failed for each in seen),
        "TTFT p50 ms": percentile([1e3 * each.chunk_s[0] for each in served], 50),
        "TPOT p50 ms": percentile([1e3 * each.tpot_s for each in served if each.output_tokens > 1], 50),
        "late ms": percentile([1e3 * (each.start_s - each.due_s) for each in seen], 99),
    }


def samples(metrics: str, name: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of a metric's samples in Prometheus' text format."""
    found = []
    for line in metrics.splitlines():
        match = SAMPLE.match(line)
        if match and match["name"] == name:
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match["labels"] or ""))
            found.append((labels, float(match["value"])))
    return found


def server_adherence(metrics: str) -> float:
    """What the server says itself: prompts whose objectives were met, of all with objectives."""
    counts = samples(metrics, "roseinfer:slo_requests_total")
    total = sum(value for _, value in counts)
    return sum(value for labels, value in counts if labels["outcome"] == "met") / total if total else float("nan")


def parse_cases(
    parser: argparse.ArgumentParser, known: Sequence[str], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """What was said, with two options more: `cases`, a list of those that are known, by default all, and `json`."""
    parser.add_argument("--cases", default=",".join(known))
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    args.cases = [case.strip() for case in args.cases.split(",")]
    if not set(args.cases) <= set(known):
        parser.error(f"--cases: known are {', '.join(known)}")
    return args
