"""File format of a cost model: `{"cost": {"step_s": ..., "token_s": ..., ...}, ...}`, seconds as in `CostParams`.

`roseinfer calibrate` writes it together with its origin, which is not read. Older files lack `chunk_context_s`, which
is 0 then. Files of an engine without K/V in host memory lack `load_s` and `store_s`, which then have their defaults. A
model with experts adds `expert_s`, `num_experts` and `num_experts_per_tok`. The fields of `DraftCost` are in files of
engines that have verified drafts; the two of a head may be missing, and are guessed then. `reads` is of a model with
windows or recurrent states: the fields of `ContextReads`.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.json_file import read_json
from roseinfer.core.runner import WHOLE_CONTEXT, ContextReads, ExpertChoice
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.params import CostParams

SECONDS_FIELDS = tuple(f.name for f in fields(CostParams) if f.type is float and f.name != "expert_s")
# Fields that a file may lack, with their defaults.
DEFAULTS = {name: getattr(CostParams(), name) for name in ("chunk_context_s", "load_s", "store_s")}
MAX_COST_S = 1e9  # of a constant: 30 years
_MAX_ROUNDING_SHARE = 1e-9  # by which shares may add up to more than 1
# A file has all of these fields or none.
EXPERT_FIELDS = ("expert_s", "num_experts", "num_experts_per_tok")
DRAFT_FIELDS = tuple(name for name in DraftCost._fields if not name.startswith("head_"))
HEAD_FIELDS = tuple(name for name in DraftCost._fields if name.startswith("head_"))


def cost_as_json(params: CostParams) -> dict[str, dict[str, Any]]:
    """Return the content of a file, without fields that have their defaults and may be missing."""
    values = {name: getattr(params, name) for name in SECONDS_FIELDS}
    cost: dict[str, Any] = {name: value for name, value in values.items() if value != DEFAULTS.get(name)}
    if params.experts is not None:
        experts = (params.expert_s, params.experts.count, params.experts.top_k)
        cost |= zip(EXPERT_FIELDS, experts, strict=True)
    if params.drafts is not None:
        cost |= params.drafts._asdict()
    if params.reads != WHOLE_CONTEXT:
        cost["reads"] = asdict(params.reads)
    return {"cost": cost}


def reads_of_json(found: Mapping[str, Any]) -> ContextReads:
    """Return what `cost_as_json` has written. Raise KeyError, TypeError or ValueError for anything else."""
    windows = tuple([(int(window), float(share)) for window, share in found["windows"]])
    reads = ContextReads(windows, float(found["state_tokens"]))
    shares = [share for _, share in windows]
    if reads.state_tokens < 0 or any(window <= 0 for window, _ in windows):
        raise ValueError("windows and state_tokens must be positive")
    if any(share < 0 for share in shares) or sum(shares) > 1 + _MAX_ROUNDING_SHARE:
        raise ValueError("shares must be positive and add up to 1 at most")
    return reads


def read_cost(path: str) -> CostParams:
    """Read a cost model. Raise `ConfigError` for a file that cannot be read or holds no cost model."""
    try:
        found = read_json(Path(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the cost model {path!r}: {reason}") from error
    cost = found.get("cost") if isinstance(found, dict) else None
    if not isinstance(cost, dict):
        raise ConfigError(f"{path} is not a cost model: 'cost' is missing")
    return _params(path, cost)


def _params(path: str, cost: Mapping[str, Any]) -> CostParams:
    cost = {**DEFAULTS, **cost}
    reads = cost.pop("reads", None)
    wholes = (EXPERT_FIELDS, DRAFT_FIELDS, HEAD_FIELDS)
    groups = [group for group in wholes if any(name in cost for name in group)]
    if HEAD_FIELDS in groups and DRAFT_FIELDS not in groups:
        groups.append(DRAFT_FIELDS)
    names = (*SECONDS_FIELDS, *chain.from_iterable(groups))
    if set(cost) != set(names):
        raise ConfigError(f"{path}: a cost model needs {', '.join(names)}, got {', '.join(sorted(cost))}")
    for name in (name for name in names if name not in EXPERT_FIELDS[1:]):
        value = cost[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_COST_S:
            raise ConfigError(f"{path}: {name} must be seconds within [0, {MAX_COST_S:g}], got {value!r}")
    values: dict[str, Any] = {name: float(cost[name]) for name in SECONDS_FIELDS}
    if EXPERT_FIELDS in groups:
        values |= {
            "expert_s": float(cost["expert_s"]),
            "experts": _experts(path, *(cost[name] for name in EXPERT_FIELDS[1:])),
        }
    if DRAFT_FIELDS in groups:
        guess = CostParams(**values).draft_cost
        values["drafts"] = guess._replace(**{name: float(cost[name]) for name in names if name in DraftCost._fields})
    if reads is not None:
        try:
            values["reads"] = reads_of_json(reads)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: reads must be windows and state_tokens, got {reads!r} ({error})") from error
    params = CostParams(**values)
    if params.step_s == params.token_s == 0:
        raise ConfigError(f"{path}: step_s and token_s must not both be 0, since time would not advance")
    return params


def _experts(path: str, count: object, top_k: object) -> ExpertChoice:
    if type(count) is not int or type(top_k) is not int or not 1 <= top_k <= count:
        raise ConfigError(
            f"{path}: num_experts and num_experts_per_tok must be integers with 1 <= num_experts_per_tok <= "
            f"num_experts, got {count!r} and {top_k!r}"
        )
    return ExpertChoice(count, top_k)
