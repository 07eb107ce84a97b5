"""Construction of a model with the draft head that the options name."""

import logging
from pathlib import Path

import torch

from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.speculation import EagleValues, SpeculationConfig
from roseinfer.core.errors import ConfigError
from roseinfer.models.eagle.config import read_eagle_spec
from roseinfer.models.eagle.loader import load_eagle_head
from roseinfer.models.eagle.model import DraftingModel, StatefulTarget
from roseinfer.models.eagle.spec import EagleSpec
from roseinfer.models.pooling.config import PoolingSpec
from roseinfer.models.spec import ModelSpec

log = logging.getLogger(__name__)


def read_head(config: SpeculationConfig, target: ModelSpec) -> EagleSpec | None:
    """Return the spec of the draft head for the target; None without one. Raise like `read_eagle_spec`."""
    values = config.values
    return read_eagle_spec(Path(values.path), target, values.aux) if isinstance(values, EagleValues) else None


def check_head_backend(asked: str, backend: str, device: torch.device) -> None:
    """Raise `ConfigError` for a GPU whose kernels cannot run a head, unless the slow backend was `asked` for."""
    if device.type == "cuda" and backend == "torch" != asked:
        raise ConfigError(
            "speculation eagle3 on a GPU needs a draft head whose attention has as many heads of the same width as the "
            "model's"
        )


def drafts_ahead(config: SpeculationConfig, pooling: PoolingSpec | None) -> int:
    """Return the maximum drafts that a head makes after a row; 0 without one."""
    values = config.values
    return values.tokens if isinstance(values, EagleValues) and pooling is None else 0


def with_head(config: EngineConfig, spec: EagleSpec, target: StatefulTarget) -> DraftingModel:
    """Return the target with its head, whose weights are read or drawn as the target's are."""
    values = config.speculation.values
    assert isinstance(values, EagleValues)
    layers = ", ".join(map(str, spec.boundaries))
    log.info("draft head %s reads the states entering layers %s of %d", values.path, layers, target.spec.num_layers)
    folder, load_format, seed = Path(values.path), config.model.load_format, config.model.seed
    return DraftingModel(target, load_eagle_head(folder, spec, target, load_format=load_format, seed=seed))
