"""A cost model in a file: `{"cost": {"step_s": ..., "token_s": ..., ...}, ...}`, seconds as in `CostParams`.

`roseinfer calibrate` writes it, with more about where it comes from, which is not read. Files from before there was
`chunk_context_s` lack it; it is 0 then. Files without `load_s` and `store_s`, of an engine without K/V in host memory,
leave these at their defaults. That of a model with experts has `expert_s`, `num_experts` and `num_experts_per_tok`.
"""

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.json_file import read_json
from roseinfer.core.runner import ExpertChoice
from roseinfer.sched.cost.params import CostParams

SECONDS = tuple(f.name for f in fields(CostParams) if f.type is float and f.name != "expert_s")
# What a file may lack, and what it then is.
LATER = {name: getattr(CostParams(), name) for name in ("chunk_context_s", "load_s", "store_s")}
# All of them or none.
EXPERTS = ("expert_s", "num_experts", "num_experts_per_tok")


def cost_as_json(params: CostParams) -> dict[str, dict[str, float]]:
    return {"cost": {name: getattr(params, name) for name in SECONDS} | experts_as_json(params)}


def experts_as_json(params: CostParams) -> dict[str, float]:
    """Empty for a model without experts."""
    experts = params.experts
    if experts is None:
        return {}
    return dict(zip(EXPERTS, (params.expert_s, experts.count, experts.top_k), strict=True))


def read_cost(path: str) -> CostParams:
    """Raises `ConfigError` for a file that cannot be read or holds no cost model."""
    try:
        found = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the cost model {path}: {error}") from error
    cost = found.get("cost") if isinstance(found, dict) else None
    if not isinstance(cost, dict):
        raise ConfigError(f"{path} holds no cost model: it lacks 'cost'")
    return _params(path, cost)


def _params(path: str, cost: Mapping[str, Any]) -> CostParams:
    cost = {**LATER, **cost}
    names = (*SECONDS, *EXPERTS) if any(name in cost for name in EXPERTS) else SECONDS
    if set(cost) != set(names):
        raise ConfigError(f"{path}: a cost model has {', '.join(names)}; this one has {', '.join(sorted(cost))}")
    for name in (name for name in names if name not in EXPERTS[1:]):
        value = cost[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value >= 0):
            raise ConfigError(f"{path}: {name} must be a number of seconds that is not negative, got {value!r}")
    values: dict[str, Any] = {name: float(cost[name]) for name in SECONDS}
    if names is not SECONDS:
        values |= {
            "expert_s": float(cost["expert_s"]),
            "experts": _experts(path, *(cost[name] for name in EXPERTS[1:])),
        }
    params = CostParams(**values)
    if params.step_s == params.token_s == 0:
        raise ConfigError(f"{path}: step_s and token_s must not both be 0: time would stand still")
    return params


def _experts(path: str, count: object, top_k: object) -> ExpertChoice:
    if type(count) is not int or type(top_k) is not int or not 1 <= top_k <= count:
        raise ConfigError(
            f"{path}: num_experts and num_experts_per_tok must be whole numbers with 1 <= num_experts_per_tok <= "
            f"num_experts, got {count!r} and {top_k!r}"
        )
    return ExpertChoice(count, top_k)
