"""Construction of a model with the draft head that the options name."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.speculation import EagleValues, HeadValues, MtpValues, SpeculationConfig
from roseinfer.core.errors import ConfigError
from roseinfer.models.eagle.config import read_eagle_spec
from roseinfer.models.eagle.loader import load_eagle_head
from roseinfer.models.eagle.model import DraftingModel, StatefulTarget
from roseinfer.models.eagle.spec import EagleSpec
from roseinfer.models.mtp.loader import load_mtp_head
from roseinfer.models.mtp.spec import MtpSpec, mtp_spec_of
from roseinfer.models.spec import MTP_HEAD, ModelSpec

log = logging.getLogger(__name__)


HeadSpec = EagleSpec | MtpSpec


def read_head(config: SpeculationConfig, target: ModelSpec) -> HeadSpec | None:
    """Return the spec of the draft head for the target; None without one. Raise like `read_eagle_spec` and
    `mtp_spec_of`.
    """
    values = config.values
    if isinstance(values, MtpValues):
        return mtp_spec_of(target)
    return read_eagle_spec(Path(values.path), target, values.aux) if isinstance(values, EagleValues) else None


def check_head_backend(asked: str, backend: str, device: torch.device) -> None:
    """Raise `ConfigError` for a GPU whose kernels cannot run a head, unless the slow backend was `asked` for."""
    if device.type == "cuda" and backend == "torch" != asked:
        raise ConfigError(
            "speculation eagle3 on a GPU needs a draft head whose attention has as many heads of the same width as the "
            "model's"
        )


def drafts_ahead(config: SpeculationConfig) -> int:
    """Return the maximum drafts that a head makes after a row; 0 without one."""
    values = config.values
    return values.tokens if isinstance(values, HeadValues) else 0


def with_draft_head(config: EngineConfig, spec: HeadSpec, target: StatefulTarget, model: Path) -> DraftingModel:
    """Return the target in folder `model` with its head, whose weights are read or drawn as the target's are."""
    values = config.speculation.values
    if isinstance(spec, MtpSpec):
        load_format, seed = config.model.load_format, config.model.seed
        return DraftingModel(target, load_mtp_head(model, spec, target, load_format=load_format, seed=seed))
    assert isinstance(values, EagleValues)
    layers = ", ".join(map(str, spec.boundaries))
    log.info("draft head %s reads the states entering layers %s of %d", values.path, layers, target.spec.num_layers)
    folder, load_format, seed = Path(values.path), config.model.load_format, config.model.seed
    return DraftingModel(target, load_eagle_head(folder, spec, target, load_format=load_format, seed=seed))


def without_used_head(spec: ModelSpec, head: HeadSpec | None) -> ModelSpec:
    """Return a model's spec, whose own draft head is not left out if it is the `head` in use."""
    if not isinstance(head, MtpSpec):
        return spec
    return replace(spec, left_out=tuple(part for part in spec.left_out if part != MTP_HEAD))
