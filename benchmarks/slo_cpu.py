"""Latency objectives on real execution: policies against loads, the embedded model on a CPU, over real HTTP.

    python -m benchmarks.slo_cpu [--loads six,long,strict] [--policies fifo,sarathi,...] [--rates a,b,...]
                                 [--seconds 12] [--json FILE]

A server per policy runs on this machine, with one thread for the engine. Loads, of which the objectives are scaled to
what one stream alone sees: a token's time I stands for 10 ms, so that 30 ms, SCORPIO's tight TPOT, are 3 I. (1.5 I, as
for a GPU, leave no room here: I is mostly the part of a step that grows with every request.)

* `six`: SCORPIO's six classes in equal shares, the loose TPOT being 5 I.
* `long`: nine tenths short prompts (0.5 s / 30 ms), a tenth of 1,000 to 1,800 tokens (10 s / 50 ms).
* `strict`: 97% with 3 s / 100 ms, 3% with 0.5 s / 22 ms.

Without `--rates` they are shares of what the fifo server does when it has more than enough to do of a load. Every
policy gets the same arrivals, prompts, lengths and classes, and each load is put on one policy after the other before
the next, so that what else the machine does falls on all of them. Client and servers share the cores: see "late", by
how much the client sent its requests too late. Needs the bench extra.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.http_load import server
from roseinfer.bench.open_loop import LoadOutcome, run
from roseinfer.bench.open_loop_report import summarise
from roseinfer.bench.report import header, host, table, write_json
from roseinfer.bench.slo_classes import read_classes

POLICIES = ("fifo", "sarathi", "qoserve", "scorpio", "slack")
TIGHT_MS, LOOSE_MS = 30.0, 50.0  # TPOT objectives of SCORPIO's classes for an 8B model; all others scale with them
# Load -> share, TTFT and TPOT objectives in ms, and optional lengths of each class.
LOADS: Mapping[str, Sequence[tuple[float, float, float, Mapping[str, int]]]] = {
    "six": (
        (1, 500, TIGHT_MS, {}),
        (1, 2000, TIGHT_MS, {}),
        (1, 3000, TIGHT_MS, {}),
        (1, 500, LOOSE_MS, {}),
        (1, 1000, LOOSE_MS, {}),
        (1, 7500, LOOSE_MS, {}),
    ),
    "long": ((9, 500, 30, {}), (1, 10_000, 50, {"in_min": 1000, "in_len": 1800})),
    "strict": ((97, 3000, 100, {}), (3, 500, 22, {})),
}
SHARES = (0.6, 0.9, 1.2, 1.6)  # share of the capacity
PROMPTS, OUTPUTS, VOCAB = (32, 384), (16, 128), 2000
CAPACITY_REQUESTS = 80
WARM_UP_S = 4.0
SMALLEST_BUDGET = 16
BUDGETS = (
    1,
    2,
    4,
)  # for sarathi, multiples of the budget that lasts as long as the tight TPOT; the best at each load counts


@dataclass(frozen=True)
class Alone:
    """Times of a single stream in seconds: per token, and the first token of a short and of the longest prompt."""

    token_s: float
    first_s: float
    longest_first_s: float

    @property
    def prompt_token_s(self) -> float:
        return max(1e-6, (self.longest_first_s - self.first_s) / (PROMPTS[1] - PROMPTS[0]))


def load(url: str, **options: Any) -> OpenLoopConfig:
    lengths = {"in_min": PROMPTS[0], "in_len": PROMPTS[1], "out_min": OUTPUTS[0], "out_len": OUTPUTS[1]}
    return OpenLoopConfig(url=url, vocab=VOCAB, procs=1, timeout=60.0, **{**lengths, **options})


async def put(config: OpenLoopConfig) -> list[LoadOutcome]:
    outcomes = await asyncio.to_thread(run, config)
    broken = [outcome.error for outcome in outcomes if outcome.status not in (200, 429, 503)]
    if broken:
        raise RuntimeError(f"{len(broken)} of {len(outcomes)} requests failed: {broken[0]}")
    return outcomes


async def measure_alone(url: str, repeats: int = 5) -> Alone:
    async def one(seed: int, in_len: int, out_len: int) -> LoadOutcome:
        (outcome,) = await put(load(url, num=1, seed=seed, in_min=0, out_min=0, in_len=in_len, out_len=out_len))
        return outcome

    short = [await one(9000 + i, PROMPTS[0], OUTPUTS[1]) for i in range(repeats)]
    long = [await one(9000 + i, PROMPTS[1], 1) for i in range(repeats)]
    return Alone(*(median(values) for values in (
        [outcome.tpot_s for outcome in short], [o.ttft_s for o in short], [o.ttft_s for o in long]
    )))  # fmt: skip


async def measure_capacity(url: str, classes: str) -> float:
    """Return requests per second with all requests present at once and without objectives. `classes`: their file."""
    config = load(url, num=CAPACITY_REQUESTS, seed=9100, slo_classes=classes, send_objectives=False)
    outcomes = await put(config)
    return len(outcomes) / max(outcome.end_s for outcome in outcomes)


def scaled_classes(name: str, tight_ms: float, loose_ms: float) -> list[dict[str, Any]]:
    """Return the classes of a load as JSON for `roseinfer bench serve --slo-classes`."""
    scale = tight_ms / TIGHT_MS
    loose = {LOOSE_MS: loose_ms} if name == "six" else {}
    return [
        {
            "name": f"c{number}",
            "share": share,
            "ttft": ttft_ms * scale / 1e3,
            "tpot": loose.get(tpot_ms, tpot_ms * scale) / 1e3,
            **own,
        }
        for number, (share, ttft_ms, tpot_ms, own) in enumerate(LOADS[name], 1)
    ]


def sarathi_budget(alone: Alone, tight_ms: float) -> int:
    """Return the tokens of a step that lasts as long as the tight TPOT objective."""
    tokens = (tight_ms / 1e3 - alone.token_s) / alone.prompt_token_s
    return max(SMALLEST_BUDGET, int(tokens) // SMALLEST_BUDGET * SMALLEST_BUDGET)


def contenders(policies: Sequence[str], budget: int) -> dict[str, list[str]]:
    """Return name -> server options."""
    found: dict[str, list[str]] = {}
    for policy in policies:
        options = ["--scheduling-policy", policy]
        if policy == "sarathi":
            found |= {f"sarathi {n * budget}": [*options, "--sarathi-token-budget", str(n * budget)] for n in BUDGETS}
        else:
            found[policy] = options
    return found


async def main(args: argparse.Namespace) -> dict[str, Any]:
    policies = args.policies.split(",")
    base = ("--threads", "1", "--api-workers", "1")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(server(args.model, [*base, "--scheduling-policy", "fifo"]))
        alone = await measure_alone(first)
        tight_ms, loose_ms = args.tight * alone.token_s * 1e3, args.loose * alone.token_s * 1e3
        budget = sarathi_budget(alone, tight_ms)
        urls = {}
        for name, options in contenders(policies, budget).items():
            own = nullcontext(first) if name == "fifo" else server(args.model, [*base, *options])
            urls[name] = await stack.enter_async_context(own)
        found: dict[str, Any] = {
            "alone_ms": {"token": 1e3 * alone.token_s, "longest_first": 1e3 * alone.longest_first_s},
            "sarathi_token_budget": budget,
            "loads": {},
        }
        print_machine(found)
        for name in args.loads.split(","):
            classes = scaled_classes(name, tight_ms, loose_ms)
            found["loads"][name] = await put_load(name, first, urls, classes, args)
        after = await measure_alone(first)
    print(f"alone, afterwards: a token every {1e3 * after.token_s:.2f} ms")
    return {**found, "alone_afterwards_ms": 1e3 * after.token_s}


async def put_load(
    name: str, first: str, urls: Mapping[str, str], classes: Sequence[Mapping[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    """Run one load at all its rates. `first`: the server that defines the rates."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "classes.json")
        file.write_text(json.dumps(classes))
        capacity = await measure_capacity(first, str(file))
    rates = [float(rate) for rate in args.rates.split(",")] if args.rates else [s * capacity for s in SHARES]
    found = {"classes": list(classes), "capacity_req_s": capacity}
    print_load(name, found)
    return {**found, "points": await put_loads(urls, rates, classes, args)}


async def put_loads(
    urls: Mapping[str, str], rates: Sequence[float], classes: Sequence[Mapping[str, Any]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run each load on every policy, starting with another policy each time."""
    names = list(urls)
    points: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "classes.json")
        file.write_text(json.dumps(classes))
        for url in urls.values():  # cost models and length estimates learn
            await put(load(url, **poisson(rates[0], WARM_UP_S, 9200), slo_classes=str(file)))
        for seed in range(args.seed, args.seed + args.seeds):
            for rate in rates:
                for name in names:
                    config = load(urls[name], **poisson(rate, args.seconds, seed), slo_classes=str(file))
                    summary = summarise(await put(config), read_classes(str(file)))
                    slo = summary["slo"]
                    points.append({"policy": name, "rate": rate, "seed": seed, "busy": os.getloadavg()[0], **summary})
                    print(f"  {name:12} {rate:6.2f} req/s, seed {seed}: {slo['adherence']:.3f}", flush=True)
                names = names[1:] + names[:1]
    return points


def poisson(rate: float, seconds: float, seed: int) -> dict[str, Any]:
    return {"workload": "poisson", "rate": rate, "num": max(1, round(rate * seconds)), "seed": seed}


def print_machine(found: Mapping[str, Any]) -> None:
    alone = found["alone_ms"]
    print(
        f"alone: a token every {alone['token']:.2f} ms, {PROMPTS[1]} prompt tokens take {alone['longest_first']:.1f} ms"
    )
    print(f"sarathi's budget: {found['sarathi_token_budget']}")


def print_load(name: str, found: Mapping[str, Any]) -> None:
    limits = [f"{1e3 * c['ttft']:.0f}/{1e3 * c['tpot']:.1f}" for c in found["classes"]]
    print(f"{name}: {found['capacity_req_s']:.2f} requests/s are all it can do; TTFT/TPOT in ms: {', '.join(limits)}")


def merged(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per policy and rate, with seeds merged and the best of several settings."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["policy"], point["rate"]), []).append(point)
    rows = []
    for (policy, rate), runs in sorted(groups.items(), key=lambda item: item[0][1]):
        slos = [point["slo"] for point in runs]
        requests, accepted = sum(slo["requests"] for slo in slos), sum(slo["accepted"] for slo in slos)
        rows.append(
            {
                "policy": policy,
                "req/s": rate,
                "requests": requests,
                "adherence": f"{sum(slo['good'] for slo in slos) / requests:.3f}",
                "goodput (window)": _mean([slo["goodput_window_req_s"] for slo in slos]),
                "(drain)": _mean([slo["goodput_req_s"] for slo in slos]),
                "refused": sum(slo["rejected"] for slo in slos),
                "accepted, missed": f"{sum(slo['accepted_missed'] for slo in slos) / max(1, accepted):.3f}",
                "by TTFT": sum(slo["missed"]["ttft"] for slo in slos),
                "by TPOT": sum(slo["missed"]["tpot"] for slo in slos),
                "late ms p99": _mean([point["sent_late_ms"]["p99"] for point in runs]),
            }
        )
    best: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        key = row["policy"].split()[0], row["req/s"]
        if key not in best or row["adherence"] > best[key]["adherence"]:
            best[key] = row
    return list(best.values())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--loads", default="six", help=f"of {', '.join(LOADS)}, with commas")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--rates", help="requests a second, with commas; default: around the capacity")
    parser.add_argument("--seconds", type=float, default=12.0, help="for which requests of a load arrive")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="loads of each rate")
    parser.add_argument("--tight", type=float, default=3.0, help="TPOT objective, in tokens' times of a stream alone")
    parser.add_argument("--loose", type=float, default=5.0)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if unknown := set(args.loads.split(",")) - set(LOADS):
        parser.error(f"unknown loads: {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    given = parse()
    print(header("Latency objectives on the CPU", vars(given), host()), flush=True)
    result = asyncio.run(main(given))
    for name, found in result["loads"].items():
        print(f"{name}:")
        print(table(merged(found["points"])))
    if given.json:
        write_json(given.json, result, vars(given), host())
