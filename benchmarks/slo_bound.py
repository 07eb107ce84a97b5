"""Upper bounds on good requests under any policy: the clairvoyant bounds of `benchmarks.research.bound`.

    python -m benchmarks.slo_bound [--loads .7,1,1.5,2,3 | --rates 7,11,15] [--requests 2000] [--seeds 3]
    python -m benchmarks.slo_bound --random-loads 20 --seed 1 [--traces DIR]

The first prints the bounds for a setup (`roseinfer simulate --setup`) with Poisson arrivals, at multiples of its
capacity, which is the rate at which 99% could be good for ever, or at rates; means over the seeds. The second does so
for loads of `benchmarks.research.grid`. In shares of the requests with objectives:

for ever        with all known, if requests arrived at this rate for ever
bound           with all known, of these arrivals; what could beat it the module says
paced           the same if no request ran faster than the tightest TPOT asks for: no bound where load comes and goes
blind           if nobody knew output lengths, and whoever outlives what is worth waiting for is dropped; paced
blind, no drops the same, but whoever has begun is served to the end; paced
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from benchmarks.research.bound import blind_bound, capacity, fluid_bound, static_bound
from benchmarks.research.random_loads import TraceNeededError, draw_load
from roseinfer.priced.machine import Machine
from roseinfer.sim.config import positive_numbers
from roseinfer.sim.setups import SETUPS
from roseinfer.sim.workload import Arrival, poisson

SAMPLE = 2000
COLUMNS: dict[str, Callable[[Sequence[Arrival], Machine], float]] = {
    "bound": fluid_bound,
    "paced": lambda arrivals, machine: fluid_bound(arrivals, machine, paced=True),
    "blind": lambda arrivals, machine: blind_bound(arrivals, machine, paced=True),
    "blind, no drops": lambda arrivals, machine: blind_bound(arrivals, machine, paced=True, stops=False),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", choices=sorted(SETUPS), default="scorpio-8b")
    parser.add_argument("--loads", default="0.7,1,1.5,2,3", help="multiples of the capacity")
    parser.add_argument("--rates", help="requests a second, instead")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--random-loads", type=int, help="so many random loads, instead of a setup", metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the random loads")
    parser.add_argument("--traces", help="directory of the traces that random loads need; without, those are left out")
    args = parser.parse_args(argv)
    if args.random_loads:
        line("load", "rate", "capacity", *COLUMNS, "what it is")
        line(*["---"] * (len(COLUMNS) + 4))
        for cells in random_loads(args.random_loads, args.seed, args.traces):
            line(*cells)
        return
    line("load", "rate", "for ever", *COLUMNS)
    line(*["---"] * (len(COLUMNS) + 3))
    for cells in of_setup(args):
        line(*cells)


def of_setup(args: argparse.Namespace) -> Iterator[list[str]]:
    setup = SETUPS[args.setup]
    sample = setup.mix.requests([0.0] * SAMPLE, seed=0)
    most = capacity(sample, setup.machine)
    rates = positive_numbers("rates", args.rates, float) or [
        most * load for load in positive_numbers("loads", args.loads, float)
    ]
    for rate in rates:
        runs = [setup.mix.requests(poisson(rate, args.requests, seed), seed) for seed in range(args.seeds)]
        found = [fmean(bound(run, setup.machine) for run in runs) for bound in COLUMNS.values()]
        steady = static_bound(sample, setup.machine, rate)
        yield [f"{rate / most:.2f}", f"{rate:.2f}", *(f"{value:.3f}" for value in (steady, *found))]


def random_loads(count: int, seed: int, traces: str | None) -> Iterator[list[str]]:
    for number in range(count):
        try:
            load = draw_load(seed, number, traces=traces)
        except TraceNeededError as error:
            yield [str(number), *[""] * (len(COLUMNS) + 2), str(error)]
            continue
        found = [bound(load.arrivals, load.machine) for bound in COLUMNS.values()]
        figures = [f"{load.rate:.2f}", f"{load.capacity:.2f}", *(f"{value:.3f}" for value in found)]
        yield [str(number), *figures, load.description.replace("|", ":")]


def line(*cells: str) -> None:
    """Format a row of a Markdown table."""
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
