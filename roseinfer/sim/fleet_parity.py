"""How near a replay comes to a recorded run of several engines: plans, promises and placements.

`serve --record FILE` with several engines writes FILE.0, FILE.1, ... for the engines, and FILE.router for the process
that sent requests to them (FILE.router.0, ... for several).
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from roseinfer.core.errors import ConfigError
from roseinfer.core.promise import Promise
from roseinfer.engine.core import EngineCore
from roseinfer.sim.parity import Parity, compare
from roseinfer.sim.placements import Placements, replay_placements
from roseinfer.sim.replay import Recording, Replay, read_recording, replay


@dataclass(frozen=True, slots=True)
class FleetParity:
    """`engines` and `routers` as they were recorded. `promises`: how many that a router has seen could be compared with
    what the engine says in its replay, of which `promises_same` are the same.
    """

    engines: list[Parity]
    routers: list[Placements]
    promises: int
    promises_same: int

    @property
    def plans_agree(self) -> bool:
        return all(engine.plans_agree for engine in self.engines)

    @property
    def medians_agree(self) -> bool:
        return all(engine.medians_agree for engine in self.engines)

    @property
    def placements_agree(self) -> bool:
        return all(router.same == len(router.recorded) for router in self.routers)

    @property
    def promises_agree(self) -> bool:
        return self.promises == self.promises_same

    def __str__(self) -> str:
        lines = []
        for number, engine in enumerate(self.engines):
            lines += [f"engine {number}", *(f"  {line}" for line in str(engine).splitlines())]
        lines.append(f"promises {self.promises_same} of {self.promises} the same")
        for router in self.routers:
            count = len(router.recorded)
            same = "all the same" if router.same == count else f"the same for the first {router.same}"
            lines.append(f"placements of {count} requests: {same}")
        return "\n".join(lines)


def is_fleet(path: str) -> bool:
    """Whether several engines were recorded under that name."""
    return not Path(path).exists() and Path(f"{path}.0").exists()


def fleet_parity_of(path: str) -> FleetParity:
    """Replay a recorded run and compare. Raises `ConfigError` if there is none, or not all of it."""
    files: list[Path] = []
    while (file := Path(f"{path}.{len(files)}")).exists():
        files.append(file)
    base = Path(path)
    routers = [replay_placements(file) for file in sorted(base.parent.glob(f"{base.name}.router*"))]
    if not files or not routers:
        raise ConfigError(f"{path} is no recorded run: there must be {path}.0 and {path}.router")
    engines, compared, same = [], 0, 0
    for number, file in enumerate(files):
        recording = read_recording(str(file))
        checks = PromiseChecks([promise for router in routers for promise in router.promises.get(number, [])])
        engines.append(compare(recording, checks.replay(recording)))
        compared, same = compared + checks.compared, same + checks.same
    return FleetParity(engines, routers, compared, same)


class PromiseChecks:
    """Asks a replayed engine in each turn what it promises, and compares with what was seen of it then."""

    def __init__(self, seen: list[Promise]) -> None:
        self.compared = self.same = 0
        self._by_steps: defaultdict[int, set[Promise]] = defaultdict(set)
        for promise in seen:
            self._by_steps[promise.steps].add(promise._replace(draining=False))

    def replay(self, recording: Recording) -> Replay:
        def launched(number: int, core: EngineCore) -> None:
            self._look(recording.turns[number].plan_s, bool(recording.turns[number].rows), core)

        return replay(recording, launched=launched)

    def _look(self, plan_s: float, planned: bool, core: EngineCore) -> None:
        """In a turn that planned a step its number tells which promise it is; those of later moments have it too."""
        steps = core.stats().step
        seen = [promise for promise in self._by_steps[steps] if promise.at_s <= plan_s] if planned else []
        told = core.promise(seen[0].at_s if seen else plan_s)
        if seen:
            self.compared += 1
            self.same += told in seen
