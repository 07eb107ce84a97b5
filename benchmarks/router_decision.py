"""What it takes to choose an engine for a request, in microseconds of the processor.

    python -m benchmarks.router_decision [--decisions 2000] [--prompt 2000] [--repeats 5]

Prompts have 2,000 tokens and their KV blocks' keys are there already. For each number of engines: no keys (a router
that needs none, or prompts that nobody has seen), keys of prompts that are new, and prompts of which half is held by
one, four or all engines. A decision includes what it leaves behind: the request counts as sent, and its keys are
entered. Every 25 decisions all engines publish anew, which is timed apart. Printed are medians over runs of the mean.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from random import Random
from time import process_time

from roseinfer.bench.report import header
from roseinfer.core.promise import DUE_S, Promise
from roseinfer.router.base import RoutingRequest
from roseinfer.router.placer import Placer
from roseinfer.router.registry import ROUTERS

COST = (4.57e-3, 17.2e-6, 13.5e-6, 34e-9)
CLASSES = ((0.5, 0.03), (2.0, 0.03), (3.0, 0.03), (0.5, 0.05), (1.0, 0.05), (7.5, 0.05))
EVERY = 25
BLOCK = 16


def promise(rng: Random, at_s: float) -> Promise:
    """Of an engine that is half full."""
    waiting = tuple(rng.randrange(500) for _ in DUE_S)
    return Promise(
        at_s,
        step_s=0.02,
        cost_s=COST,
        keep=0.97,
        smallest_s=rng.choice((0.03, 0.05)),
        busy=rng.uniform(0.1, 0.5),
        weights=rng.uniform(0.0, 0.05),
        arriving=rng.uniform(0.0, 0.2),
        fill_tokens=rng.randrange(1000),
        waiting_tokens=waiting,
        output_tokens=300.0,
        running=rng.randrange(100),
        waiting=rng.randrange(5),
    )


def ask(rng: Random, prompt: int, keys: list[int]) -> RoutingRequest:
    ttft_s, tpot_s = rng.choice(CLASSES)
    return RoutingRequest(prompt, keys, BLOCK, 200.0, ttft_s, tpot_s)


class Fleet:
    def __init__(self, routing: str, engines: int, seed: int) -> None:
        self.rng = Random(seed)
        self.placer = Placer(routing, range(engines), share=4, seed=seed, blocks=20_000)
        self.engines = engines
        self.now_s = 10.0

    def publish(self) -> float:
        """Seconds that taking a promise takes."""
        self.now_s += 0.02
        news = [promise(self.rng, self.now_s) for _ in range(self.engines)]
        began = process_time()
        for engine, news_of in enumerate(news):
            self.placer.update(engine, news_of)
        return (process_time() - began) / self.engines

    def decide(self, asks: list[RoutingRequest]) -> tuple[float, float]:
        """Microseconds of a decision and of taking a promise."""
        spent, published = 0.0, 0.0
        for first in range(0, len(asks), EVERY):
            published += self.publish()
            part = asks[first : first + EVERY]
            place, now_s = self.placer.place, self.now_s
            began = process_time()
            for one in part:
                place(one, now_s)
            spent += process_time() - began
        return 1e6 * spent / len(asks), 1e6 * published * EVERY / len(asks)


def no_keys(fleet: Fleet, count: int, prompt: int) -> list[RoutingRequest]:
    return [ask(fleet.rng, prompt, []) for _ in range(count)]


def new(fleet: Fleet, count: int, prompt: int) -> list[RoutingRequest]:
    rng = fleet.rng
    return [ask(rng, prompt, [rng.getrandbits(64) for _ in range(prompt // BLOCK)]) for _ in range(count)]


def held_by(holders: int) -> Callable[[Fleet, int, int], list[RoutingRequest]]:
    """Half of each prompt is one of 20 prefixes, each of which so many engines hold."""

    def make(fleet: Fleet, count: int, prompt: int) -> list[RoutingRequest]:
        rng, blocks = fleet.rng, prompt // BLOCK
        prefixes = [[rng.getrandbits(64) for _ in range(blocks // 2)] for _ in range(20)]
        for prefix in prefixes:
            for engine in rng.sample(range(fleet.engines), min(holders, fleet.engines)):
                fleet.placer.place(
                    RoutingRequest(prompt, prefix), 0.0, [e for e in range(fleet.engines) if e != engine]
                )
        asks = []
        for _ in range(count):
            own = [rng.getrandbits(64) for _ in range(blocks - blocks // 2)]
            asks.append(ask(rng, prompt, rng.choice(prefixes) + own))
        return asks

    return make


CASES = (
    ("no keys", no_keys),
    ("new prompts", new),
    ("held by one", held_by(1)),
    ("held by four", held_by(4)),
    ("held by all", held_by(10_000)),
)


def measure(
    routing: str, engines: int, make: Callable[[Fleet, int, int], list[RoutingRequest]], args: argparse.Namespace
) -> str:
    figures = []
    for repeat in range(args.repeats):
        fleet = Fleet(routing, engines, repeat)
        asks = make(fleet, args.decisions, args.prompt)
        gc.collect()
        gc.disable()
        figures.append(fleet.decide(asks))
        gc.enable()
    decision = statistics.median([figure[0] for figure in figures])
    return f"{decision:.1f} | {statistics.median([figure[1] for figure in figures]):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", default="4,32")
    parser.add_argument("--routers", default="pace", help=f"of {','.join(ROUTERS)}")
    args = parser.parse_args()
    print(header("router decision", vars(args)))
    print("| router | engines | prompts | us a decision | us a promise |\n| --- | --- | --- | --- | --- |")
    for routing in args.routers.split(","):
        for engines in map(int, args.engines.split(",")):
            for name, make in CASES:
                print(f"| {routing} | {engines} | {name} | {measure(routing, engines, make, args)} |", flush=True)


if __name__ == "__main__":
    main()
