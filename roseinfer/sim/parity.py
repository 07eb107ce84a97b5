"""Parity: how closely a replay reproduces the recorded run, of one engine or of several behind a router."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from roseinfer.core.errors import ConfigError
from roseinfer.core.promise import Promise
from roseinfer.engine.core import EngineCore
from roseinfer.sim.replay import EngineRecording, Replay, read_recording, replay
from roseinfer.sim.router_replay import RouterReplay, replay_placements

MAX_MEDIAN_ERROR_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Parity:
    """Comparison of a replay with the recorded run. The plans of the first `same` of `turns` turns are equal.

    `ttft_s`, `tpot_s`: medians (run, replay) over the requests that ended with output in both; None without any.
    """

    requests: int
    compared: int
    turns: int
    same: int
    ttft_s: tuple[float, float] | None
    tpot_s: tuple[float, float] | None

    @property
    def plans_agree(self) -> bool:
        return self.same == self.turns

    @property
    def medians_agree(self) -> bool:
        """True if the medians agree to within 5%."""
        pairs = [pair for pair in (self.ttft_s, self.tpot_s) if pair is not None]
        return all(abs(again - run) <= MAX_MEDIAN_ERROR_SHARE * run for run, again in pairs)

    def __str__(self) -> str:
        lines = [f"{self.requests} requests, {self.turns} turns of the engine"]
        if self.plans_agree:
            lines.append("plans    all the same")
        else:
            lines.append(f"plans    the same in the first {self.same} turns")
        for name, pair in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s)):
            if pair is not None:
                run, again = pair
                change = f"{again / run - 1:+.2%}" if run else "-"
                lines.append(f"{name} p50 run {1e3 * run:.3f} ms, replay {1e3 * again:.3f} ms ({change})")
        return "\n".join(lines)


def parity_of(path: str) -> Parity:
    """Replay a recorded run and compare. Raise `ConfigError` if the file is not one."""
    recording = read_recording(path)
    return compare(recording, replay(recording))


def compare(recording: EngineRecording, again: Replay) -> Parity:
    planned = zip(recording.plans, recording.copies, strict=True)
    pairs = list(zip(planned, zip(again.plans, again.copies, strict=True), strict=True))
    same = next((turn for turn, (run, replayed) in enumerate(pairs) if run != replayed), len(pairs))
    ends = {name: end for name, end in recording.ends.items() if end.ttft_s is not None and name in again.ttft_s}
    return Parity(
        requests=len(recording.requests),
        compared=len(ends),
        turns=len(pairs),
        same=same,
        ttft_s=_medians((end.ttft_s, again.ttft_s[name]) for name, end in ends.items()),
        tpot_s=_medians((end.tpot_s, again.tpot_s[name]) for name, end in ends.items()),
    )


def _medians(pairs: Iterable[tuple[float | None, float | None]]) -> tuple[float, float] | None:
    known = [(run, again) for run, again in pairs if run is not None and again is not None]
    if not known:
        return None
    return median(run for run, _ in known), median(again for _, again in known)


# --- several engines -------------------------------------------------------------------------------------------------
FIRST_WITHIN_S = 1.0  # an engine's first promise is at most this long before its first plan


@dataclass(frozen=True, slots=True)
class FleetParity:
    """Parity of several engines. `engines`: by what follows FILE in the names of their recordings.

    `promises`: number of promises that a router has seen and the replay repeats; `promises_same` of them are equal.
    """

    engines: dict[str, Parity]
    routers: list[RouterReplay]
    promises: int
    promises_same: int

    @property
    def plans_agree(self) -> bool:
        return all(engine.plans_agree for engine in self.engines.values())

    @property
    def medians_agree(self) -> bool:
        return all(engine.medians_agree for engine in self.engines.values())

    @property
    def placements_agree(self) -> bool:
        return all(router.same == len(router.recorded) for router in self.routers)

    @property
    def promises_agree(self) -> bool:
        return self.promises == self.promises_same

    def __str__(self) -> str:
        lines = []
        for name, engine in self.engines.items():
            lines += [f"engine {name}", *(f"  {line}" for line in str(engine).splitlines())]
        lines.append(f"promises {self.promises_same} of {self.promises} the same")
        for router in self.routers:
            count = len(router.recorded)
            same = "all the same" if router.same == count else f"the same for the first {router.same}"
            lines.append(f"placements of {count} requests: {same}")
        return "\n".join(lines)


def is_fleet(path: str) -> bool:
    """True if `path` names a recording of several engines."""
    return not Path(path).exists() and Path(f"{path}.0").exists()


def fleet_parity_of(path: str) -> FleetParity:
    """Replay a recorded run of several engines and compare. Raise `ConfigError` if files are missing."""
    files = dict(_engine_files(path))
    base = Path(path)
    routers = [replay_placements(file) for file in sorted(base.parent.glob(f"{base.name}.router*"))]
    if not files or not routers:
        raise ConfigError(f"{path} is not a recorded run: {path}.0 or {path}.router is missing")
    engines, compared, same = {}, 0, 0
    for name, number in files.items():
        recording = read_recording(f"{path}.{name}")
        checks = PromiseChecks([promise for router in routers for promise in router.promises.get(number, [])])
        engines[name] = compare(recording, checks.replay(recording))
        compared, same = compared + checks.compared, same + checks.same
    return FleetParity(engines, routers, compared, same)


def _engine_files(path: str) -> Iterator[tuple[str, int]]:
    """Yield what follows `path` in the names of the recordings, and the engine's number."""
    number = 0
    while Path(f"{path}.{number}").exists():
        yield str(number), number
        life = 2
        while Path(f"{path}.{number}.{life}").exists():
            yield f"{number}.{life}", number
            life += 1
        number += 1


class PromiseChecks:
    """Comparison of a replayed engine's promise in each turn with the one that routers saw."""

    def __init__(self, seen: list[Promise]) -> None:
        self.compared = self.same = 0
        self._by_steps: defaultdict[int, set[Promise]] = defaultdict(set)
        for promise in seen:
            if not promise.running:  # made after the step, as of its beginning
                continue
            self._by_steps[promise.steps].add(promise._replace(draining=False))

    def replay(self, recording: EngineRecording) -> Replay:
        turns = recording.turns

        def launched(number: int, core: EngineCore) -> None:
            plan_s = turns[number].plan_s
            since_s = turns[number - 1].commit_s if number else plan_s - FIRST_WITHIN_S
            self._look(since_s, plan_s, bool(turns[number].rows), core)

        return replay(recording, launched=launched)

    def _look(self, since_s: float, plan_s: float, planned: bool, core: EngineCore) -> None:
        """Compare the promise of one turn, found by its step number and time: later promises have the same number."""
        of_step = self._by_steps[core.stats().step] if planned else ()
        seen = [promise for promise in of_step if since_s <= promise.at_s <= plan_s]
        replayed = core.promise(seen[0].at_s if seen else plan_s)
        if seen:
            self.compared += 1
            self.same += replayed in seen
