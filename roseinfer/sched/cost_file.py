"""A cost model in a file: `{"cost": {"step_s": ..., "token_s": ..., ...}, ...}`, seconds as in `CostParams`.

`roseinfer calibrate` writes it, with more about where it comes from, which is not read. Files from before there was
`chunk_context_s` lack it; it is 0 then. Files without `load_s` and `store_s`, of an engine without K/V in host memory,
leave these at their defaults.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.sched.cost import CostParams

# What a file may lack, and what it then is.
LATER = {name: getattr(CostParams(), name) for name in ("chunk_context_s", "load_s", "store_s")}


def cost_as_json(params: CostParams) -> dict[str, dict[str, float]]:
    return {"cost": asdict(params)}


def read_cost(path: str) -> CostParams:
    """Raises `ConfigError` for a file that cannot be read or holds no cost model."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the cost model {path}: {error}") from error
    cost = found.get("cost") if isinstance(found, dict) else None
    if not isinstance(cost, dict):
        raise ConfigError(f"{path} holds no cost model: it lacks 'cost'")
    return _params(path, cost)


def _params(path: str, cost: Mapping[str, Any]) -> CostParams:
    names = [f.name for f in fields(CostParams)]
    cost = {**LATER, **cost}
    if set(cost) != set(names):
        raise ConfigError(f"{path}: a cost model has {', '.join(names)}; this one has {', '.join(sorted(cost))}")
    for name, value in cost.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value >= 0):
            raise ConfigError(f"{path}: {name} must be a number of seconds that is not negative, got {value!r}")
    params = CostParams(**{name: float(cost[name]) for name in names})
    if params.step_s == params.token_s == 0:
        raise ConfigError(f"{path}: step_s and token_s must not both be 0: time would stand still")
    return params
