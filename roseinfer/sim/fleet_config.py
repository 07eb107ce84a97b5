"""The options of `roseinfer simulate` for several engines."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from roseinfer.core.config.option import option, positive_numbers
from roseinfer.core.errors import ConfigError
from roseinfer.router.registry import ROUTERS
from roseinfer.sim.fleet_plan import AutoscalePlan, FleetPlan, Kill


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Several engines behind a router. Engines are numbered from 0."""

    replicas: str | None = option(None, "engines behind a router; compare several numbers: a,b,...", metavar="N")
    router: str | None = option(None, f"compare these: {', '.join(ROUTERS)}; default: pace", metavar="NAMES")
    slow: str | None = option(
        None, "each engine takes so many times as long, and its policy is not told: 1,1,1,1.5", metavar="FACTORS"
    )
    kill: str | None = option(None, "engines that die, and the times: ENGINE@SECONDS,...", metavar="ENGINE@S")
    start_s: float = option(40.0, "seconds until a restarted or new engine serves")
    autoscale: str | None = option(
        None, "the number of engines follows the load; compared with fixed numbers of them", metavar="LEAST-MOST"
    )
    autoscale_patience_s: float = option(600.0, "autoscale: seconds that fewer engines must suffice before one goes")

    def __post_init__(self) -> None:
        for name in ("start_s", "autoscale_patience_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must not be negative, got {value}")
        if self.active:
            _ = self.plans(0.95)

    @property
    def active(self) -> bool:
        return self.replicas is not None or self.autoscale is not None

    def check_needed(self, given: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for an option of several engines where there is one."""
        wrong = next((f.name for f in fields(self) if f.name in given), None)
        if wrong and not self.active:
            raise ConfigError(f"{wrong} needs --replicas")
        if "autoscale_patience_s" in given and self.autoscale is None:
            raise ConfigError("--autoscale-patience-s needs --autoscale")
        if "start_s" in given and self.kill is None and self.autoscale is None:
            raise ConfigError("--start-s needs --kill or --autoscale")

    def plans(self, target: float) -> list[FleetPlan]:
        """Return the fleets to compare, in order. `target`: share of good requests that an autoscaler maintains."""
        scaling = self._scaling(target)
        sizes = self._sizes(scaling)
        if scaling is not None and self.slow is not None:
            raise ConfigError("--autoscale and --slow cannot be combined, since the engines are not fixed")
        slow, kills = self._slow(sizes), self._kills(sizes)
        plans = []
        for router in self._routers():
            if scaling is not None:
                plans.append(FleetPlan(scaling.min_engines, router, kills=kills, start_s=self.start_s, scaling=scaling))
            plans += [FleetPlan(size, router, slow, kills, self.start_s) for size in sizes]
        return plans

    def _routers(self) -> list[str]:
        names = [name.strip() for name in (self.router or "pace").split(",") if name.strip()]
        for name in names:
            if name not in ROUTERS:
                raise ConfigError(f"router: unknown router {name!r}; use {', '.join(ROUTERS)}")
        return list(dict.fromkeys(names))

    def _sizes(self, scaling: AutoscalePlan | None) -> list[int]:
        if self.replicas is None:
            assert scaling is not None
            return list(range(scaling.min_engines, scaling.max_engines + 1))
        return _counts("replicas", self.replicas.split(","))

    def _scaling(self, target: float) -> AutoscalePlan | None:
        if self.autoscale is None:
            return None
        bounds = _counts("autoscale", self.autoscale.split("-"))
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            raise ConfigError(f"autoscale must be LEAST-MOST, such as 2-6, got {self.autoscale}")
        return AutoscalePlan(bounds[0], bounds[1], target=target, patience_s=self.autoscale_patience_s)

    def _slow(self, sizes: list[int]) -> tuple[float, ...]:
        factors = positive_numbers("slow", self.slow, float)
        if self.slow is not None:
            _check_one_each("slow", len(factors), sizes)
        return factors

    def _kills(self, sizes: list[int]) -> tuple[Kill, ...]:
        found = []
        for part in (self.kill or "").split(","):
            if not part.strip():
                continue
            engine, _, at_s = part.partition("@")
            try:
                kill = Kill(int(engine), float(at_s))
            except ValueError:
                raise ConfigError(f"kill must be ENGINE@SECONDS, such as 2@30, got {part.strip()}") from None
            if not (0 <= kill.engine < min(sizes) and isfinite(kill.at_s) and kill.at_s >= 0):
                raise ConfigError(f"kill: {part.strip()}: engines are 0 to {min(sizes) - 1}, and time begins at 0")
            found.append(kill)
        return tuple(sorted(found, key=lambda kill: kill.at_s))


def _counts(name: str, parts: list[str]) -> list[int]:
    try:
        counts = [int(part) for part in parts]
    except ValueError:
        raise ConfigError(f"{name} must be whole numbers, got {'-'.join(parts)}") from None
    if min(counts) < 1:
        raise ConfigError(f"{name} must be positive, got {min(counts)}")
    return counts


def _check_one_each(name: str, count: int, sizes: list[int]) -> None:
    if sizes != [count]:
        wanted = ", ".join(map(str, sizes))
        raise ConfigError(f"{name}: {count} are given for {wanted} engines: one each, and one number for --replicas")
