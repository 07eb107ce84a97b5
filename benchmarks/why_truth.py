"""Check of causes: remove what a request is said to wait for, and see whether it starts.

    python -m benchmarks.why_truth [--policies slack,fifo] [--loads overload,tenants] [--samples 12] [--seeds 1]

Each load (`benchmarks/why_loads.py`) is simulated. For random plans the script records what waiting requests wait for,
and at the end why rejected requests were rejected. It draws a sample of both for each cause and load. It then repeats
the run up to that plan (for rejected requests: up to the first plan that saw them), and continues in a copy of the
engine from which the cause was removed, while the same requests arrive:

    seats, blocks, prompt_budget   are unlimited
    utilisation                    running requests are removed
    step                           the request arrives when the step ends that ran at its arrival
    queue                          waiting requests, and those whose prompts are not computed, are removed
    price                          the request arrives now with a prompt and an output of at most 8 tokens; if it was
                                   promised only a TPOT, which lets all others pass, the waiting requests are removed
    pace                           the request arrives now with half the token rate of the reserved pace, or three times
                                   the time for its last token
    tenant                         all other work of its tenant, past and present, is removed

A waiting request's cause is true if the request starts earlier than it did, and within --window seconds or half of its
remaining wait (others may be ahead of it). For price, pace and tenant, which are decided over seconds, the limit is the
time for its first token (10 s without an objective). A rejected request's cause is true if the request starts. Each
attainable value is tried too, in the plan that rejected the request: "attainable" if it is not rejected with that
objective, "kept" if it meets it.
"""

import argparse
import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any, NamedTuple

from benchmarks.why_loads import LOADS, Load
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import Request, sequence_id
from roseinfer.core.slo import Cause, Rejection, Slo
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.engine import SimulatedEngine
from roseinfer.sim.simulator import add_of
from roseinfer.sim.workload import Arrival

MANY = 100_000
SPARE = 20_000  # blocks that nobody has until they are given away
HOARD = "hoard"
FEW = 8  # tokens
UNPROMISED_S = 10.0
OVERLOAD = (Cause.PRICE, Cause.PACE, Cause.TENANT)


class Sample(NamedTuple):
    """Request `number` and what it waited for in plan `turn`, or why it was rejected there (`rejection`)."""

    turn: int
    number: int
    cause: Cause
    rejection: Rejection | None = None


class Run:
    """One load under one policy, plan by plan. `started`, `refused`, `ended`: by request number, in seconds; `seen`:
    the first plan that knew the request.
    """

    def __init__(self, load: Load, policy: str, arrivals: Sequence[Arrival]) -> None:
        config = scheduler_config(scheduling_policy=policy, **load.scheduler)
        machine = replace(load.machine, num_blocks=load.machine.num_blocks + SPARE)
        self.engine = SimulatedEngine(config, machine)
        scheduler = self.engine.core.scheduler
        scheduler.seating.reserve = int(load.machine.num_blocks * 0.01)
        scheduler.kv.open(HOARD)
        scheduler.kv.grow(HOARD, SPARE * machine.block_size)
        self.arrivals = arrivals
        self.came = self.turn = 0
        self.seen: dict[int, int] = {}
        self.started: dict[int, float] = {}
        self.refused: dict[int, tuple[int, Rejection]] = {}
        self.refused_s: dict[int, float] = {}
        self.token_s: dict[int, list[float]] = defaultdict(list)
        self.ended: set[int] = set()

    def copy(self) -> "Run":
        """Return a copy that continues independently."""
        return copy.deepcopy(self, {id(self.arrivals): self.arrivals})

    @property
    def now_s(self) -> float:
        return self.engine.clock.now()

    @property
    def over(self) -> bool:
        return self.came == len(self.arrivals) and not self.engine.busy

    @property
    def waiting(self) -> Iterator[tuple[int, Request]]:
        return ((_number(request), request) for request in self.engine.core.scheduler.waiting)

    def request(self, number: int) -> Request:
        return self.engine.core.scheduler.roster.requests[sequence_id(str(number), 0)]

    def cause(self, request: Request) -> Cause:
        """Return the cause that the request waits for at present."""
        return self.engine.core.scheduler.roster.waits.cause(request)

    def arrive(self) -> None:
        """Advance time to the next event, and add the requests that arrive."""
        next_s = self.arrivals[self.came].at_s if self.came < len(self.arrivals) else inf
        self.engine.wake(min(self.engine.next_s, next_s))
        while self.came < len(self.arrivals) and self.arrivals[self.came].at_s <= self.now_s:
            self.add(self.came, self.arrivals[self.came])
            self.seen[self.came] = self.turn
            self.came += 1

    def add(self, number: int, arrival: Arrival) -> None:
        self.engine.add(add_of(arrival, str(number), self.engine.machine.max_model_len), arrival.output_len)

    def abort(self, request: Request) -> None:
        self.engine.core.scheduler.abort(request.request_id, self.now_s)

    def go(self) -> None:
        """Run one turn: plan, and the end of the step."""
        waited = list(self.waiting)
        planned_s = self.now_s
        outputs = self.engine.launch()
        for number, request in waited:
            if request.seat is not None:
                self.started.setdefault(number, planned_s)
        outputs += self.engine.settle()
        for name, token_ids, _, _, _, end, _ in outputs:
            number = int(name.partition(":")[0])
            self.token_s[number] += [self.now_s] * len(token_ids)
            if end is not None:
                self.ended.add(number)
            if end is not None and end.rejection is not None:
                self.refused[number] = (self.turn, end.rejection)
                self.refused_s[number] = planned_s
        self.turn += 1


def _number(request: Request) -> int:
    return int(request.request_id.partition(":")[0])


def _reconfigure(run: Run, **options: int) -> None:
    """Change options of the scheduler and of every copy of them."""
    scheduler = run.engine.core.scheduler
    for name, value in options.items():
        object.__setattr__(scheduler.config, name, value)
    scheduler.limits = run.engine.runner._limits = StepLimits.of(scheduler.config, scheduler.max_model_len)
    policy: Any = run.engine.policy._policy
    for place, name in ((policy, "_seats"), (getattr(policy, "state", None), "seats")):
        if hasattr(place, name):
            setattr(place, name, scheduler.config.max_running)


def _more_seats(run: Run, request: Request) -> None:
    scheduler = run.engine.core.scheduler
    scheduler.roster.free_seats += range(scheduler.config.seats, MANY)
    _reconfigure(run, max_num_seqs=MANY)


def _more_blocks(run: Run, request: Request) -> None:
    run.engine.core.scheduler.kv.close(HOARD)


def _larger_budget(run: Run, request: Request) -> None:
    _reconfigure(run, max_num_batched_tokens=MANY)


def _none_running(run: Run, request: Request) -> None:
    for other in list(run.engine.core.scheduler.running.values()):
        run.abort(other)
    state = getattr(run.engine.policy._policy, "state", None)
    if state is not None:  # the policy also forgets what it has observed of them
        state.recent_step_s, state._refreshed_s = 0.0, -inf


def _no_prompts(run: Run, request: Request) -> None:
    scheduler = run.engine.core.scheduler
    filling = [other for other in scheduler.running.values() if other.remaining > 1]
    for other in [*filling, *scheduler.waiting]:
        if other is not request:
            run.abort(other)


def _just_now(run: Run, request: Request) -> None:
    """Let the request arrive when the step that ran at its arrival ends."""
    _again(run, request, at_s=run.now_s)


def _again(run: Run, request: Request, **changes: Any) -> None:
    """Let the request ask for something else, with its original arrival."""
    number = _number(request)
    run.abort(request)
    run.add(number, replace(run.arrivals[number], **changes))


def _little_work(run: Run, request: Request) -> None:
    arrival = run.arrivals[_number(request)]
    slo = arrival.slo
    if slo is not None and slo.ttft_s is None and slo.e2e_s is None:
        for _, other in list(run.waiting):
            if other is not request:
                run.abort(other)
        price = run.engine.policy._policy.state.price  # type: ignore[attr-defined]
        price._offered.clear()
        price._next_s = -inf
        return
    few = min(FEW, arrival.output_len)
    _again(run, request, at_s=run.now_s, prompt_ids=arrival.prompt_ids[:FEW], output_len=few, predicted_len=few)


def _looser_pace(run: Run, request: Request) -> None:
    slo = run.arrivals[_number(request)].slo
    assert slo is not None
    held_s = run.engine.policy._policy.state.price.pace_s  # type: ignore[attr-defined]
    tpot_s = None if slo.tpot_s is None else 2 * max(held_s, slo.tpot_s)
    e2e_s = None if slo.e2e_s is None else 3 * slo.e2e_s
    _again(run, request, at_s=run.now_s, slo=replace(slo, tpot_s=tpot_s, e2e_s=e2e_s))


def _no_others_of_its_tenant(run: Run, request: Request) -> None:
    scheduler = run.engine.core.scheduler
    for other in [*scheduler.running.values(), *scheduler.waiting]:
        if other is not request and other.tenant == request.tenant:
            run.abort(other)
    tenants = run.engine.policy._policy.state.tenants  # type: ignore[attr-defined]
    tenants._total -= tenants._work.pop(request.tenant, 0.0)
    _again(run, request)


def _attainable(run: Run, request: Request, rejection: Rejection) -> None:
    _again(run, request, slo=_loosened(run.arrivals[_number(request)], rejection))


def _loosened(arrival: Arrival, rejection: Rejection) -> Slo:
    """Return its objectives without the unattainable part, replaced by what was attainable."""
    changed: dict[str, Any] = {f"{rejection.reason}_s": rejection.attainable_s}
    return replace(arrival.slo or Slo(), **changed)


REMOVALS: dict[Cause, Callable[[Run, Request], None]] = {
    Cause.SEATS: _more_seats,
    Cause.BLOCKS: _more_blocks,
    Cause.BUDGET: _larger_budget,
    Cause.UTILISATION: _none_running,
    Cause.QUEUE: _no_prompts,
    Cause.STEP: _just_now,
    Cause.PRICE: _little_work,
    Cause.PACE: _looser_pace,
    Cause.TENANT: _no_others_of_its_tenant,
}


def draw(
    load: Load, policy: str, arrivals: Sequence[Arrival], samples: int, rng: random.Random
) -> tuple[Run, list[Sample]]:
    """Return the run as it was, and a sample of each cause, for waiting and for rejected requests."""
    run, found = Run(load, policy, arrivals), defaultdict(list)
    while not run.over:
        run.arrive()
        run.go()
        if rng.random() < 0.2:
            for number, request in run.waiting:
                sample = Sample(run.turn - 1, number, run.cause(request))
                if number in run.seen and run.seen[number] < run.turn:
                    found[sample.cause, False].append(sample)
    for number, (turn, rejection) in run.refused.items():
        found[rejection.cause, True].append(Sample(turn, number, rejection.cause, rejection))
    drawn = [sample for _, cases in sorted(found.items()) for sample in rng.sample(cases, min(samples, len(cases)))]
    return run, drawn


class Case(NamedTuple):
    """One check. `kind`: "waits", "refused", "attainable" or "kept"."""

    kind: str
    sample: Sample
    true: bool


def check(
    load: Load, policy: str, arrivals: Sequence[Arrival], before: Run, drawn: list[Sample], window_s: float
) -> Iterator[Case]:
    """Check what becomes of each sample without its cause."""
    planned = defaultdict(list)
    for sample in drawn:
        rejection = sample.rejection
        if sample.cause in REMOVALS:
            planned[before.seen[sample.number] if rejection else sample.turn].append((sample, False))
        if rejection is not None and rejection.attainable_s is not None:
            planned[sample.turn].append((sample, True))
    run = Run(load, policy, arrivals)
    while planned:
        run.arrive()
        for sample, attainable in planned.pop(run.turn, ()):
            if attainable:
                yield from _try_attainable(run.copy(), sample)
            elif sample.rejection is not None:
                yield Case("refused", sample, _starts(_without(run, sample), sample.number) is not None)
            else:
                yield Case("waits", sample, _sooner(_without(run, sample), sample, before, window_s))
        run.go()


def _without(run: Run, sample: Sample) -> Run:
    run = run.copy()
    REMOVALS[sample.cause](run, run.request(sample.number))
    return run


def _starts(run: Run, number: int, until_s: float = inf) -> float | None:
    """Return when the request starts; None if it is rejected first, or if it starts later than `until_s`."""
    run.refused.pop(number, None)
    while not run.over and run.now_s <= until_s:
        run.go()
        if number in run.started:
            return run.started[number]
        if number in run.refused:
            return None
        run.arrive()
    return None


def _sooner(run: Run, sample: Sample, before: Run, window_s: float) -> bool:
    slo = run.arrivals[sample.number].slo
    waited_until_s = before.refused_s.get(sample.number, before.started.get(sample.number, inf))
    until_s = run.now_s + max(window_s, 0.5 * (waited_until_s - run.now_s))
    if sample.cause in OVERLOAD:
        until_s = max(until_s, run.now_s + (UNPROMISED_S if slo is None or slo.ttft_s is None else slo.ttft_s))
    run.started.pop(sample.number, None)  # it may have been preempted since
    start_s = _starts(run, sample.number, until_s)
    return start_s is not None and (sample.number in before.refused or start_s < before.started[sample.number])


def _try_attainable(run: Run, sample: Sample) -> Iterator[Case]:
    assert sample.rejection is not None
    number = sample.number
    _attainable(run, run.request(number), sample.rejection)
    starts = _starts(run, number) is not None
    yield Case("attainable", sample, starts)
    if starts:
        while number not in run.ended:
            run.arrive()
            run.go()
        asked = _loosened(run.arrivals[number], sample.rejection)
        first_s, last_s, tokens = run.token_s[number][0], run.token_s[number][-1], len(run.token_s[number])
        at_s = run.arrivals[number].at_s
        missed = asked.missed(first_s - at_s, (last_s - first_s) / max(1, tokens - 1), last_s - at_s)
        yield Case("kept", sample, sample.rejection.reason not in missed)


KINDS = ("waits", "refused")


def truth(
    load: Load,
    policy: str,
    *,
    requests: int,
    samples: int,
    window_s: float,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
) -> list[Case]:
    """Check the cases of one load under one policy. `kinds`: waiting requests, rejected ones, or both."""
    arrivals = load.requests(requests, seed)
    before, drawn = draw(load, policy, arrivals, samples, random.Random(f"why {load.name} {policy} {seed}"))
    drawn = [sample for sample in drawn if KINDS[sample.rejection is not None] in kinds]
    return list(check(load, policy, arrivals, before, drawn, window_s))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="slack")
    parser.add_argument("--loads", help="names, some of: " + ", ".join(load.name for load in LOADS))
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--samples", type=int, default=12, help="of each cause and load")
    parser.add_argument("--window", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each load")
    parser.add_argument("--verbose", action="store_true", help="each case that is not true")
    args = parser.parse_args(argv)
    chosen = [load for load in LOADS if args.loads is None or load.name in args.loads.split(",")]
    for policy in args.policies.split(","):
        true: Counter[tuple[str, str]] = Counter()
        cases: Counter[tuple[str, str]] = Counter()
        for load, seed in product(chosen, range(args.seeds)):
            found = truth(load, policy, requests=args.requests, samples=args.samples, window_s=args.window, seed=seed)
            for kind, sample, holds in found:
                said = sample.rejection
                key = (kind, said.reason if said and kind in ("attainable", "kept") else sample.cause)
                cases[key] += 1
                true[key] += holds
                if args.verbose and not holds:
                    print(f"  {load.name}: {kind} {sample}", flush=True)
            if args.verbose:
                print(load.name, seed, {key: (true[key], cases[key]) for key in cases}, flush=True)
        print(f"| {policy} | cases | true |")
        for key in sorted(cases):
            print(f"| {' '.join(key)} | {cases[key]} | {true[key] / cases[key]:.1%} |")


if __name__ == "__main__":
    main()
