"""Descriptions of engines for tests."""

from dataclasses import fields, replace
from typing import Any

from roseinfer.core.plan import StepLimits
from roseinfer.core.runner import RunnerFacts
from roseinfer.core.traits import PolicyTraits
from roseinfer.engine.api import EngineInfo

_FACTS = {field.name for field in fields(RunnerFacts)}
_SMALL = EngineInfo(
    model="fake",
    facts=RunnerFacts(
        model_type="fake",
        max_model_len=256,
        num_blocks=64,
        block_size=4,
        limits=StepLimits(8, 256),
        vocab_size=256,
        eos_token_ids=(),
        dtype="float32",
        weights="float32",
        device="cpu",
        default_sampling={},
        startup_s={},
    ),
    max_num_seqs=8,
    kv_cache="float32",
    adapters_change=True,
    policy=PolicyTraits("slack", sheds=True, priorities=True),
)


def engine_info(**values: Any) -> EngineInfo:
    """Return the description of a small engine with some fields changed, those of its facts included."""
    return changed(_SMALL, **{"startup_s": {}} | values)


def changed(info: EngineInfo, **values: Any) -> EngineInfo:
    """Return `info` with some fields changed, those of its facts included."""
    facts = replace(info.facts, **{name: values[name] for name in _FACTS & values.keys()})
    return replace(info, facts=facts, **{name: values[name] for name in values.keys() - _FACTS})
