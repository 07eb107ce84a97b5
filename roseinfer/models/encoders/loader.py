"""Loader of encoders: from safetensors, or with random weights."""

from collections.abc import Sequence
from pathlib import Path

import torch

from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError
from roseinfer.models.encoders.base import EncoderModel
from roseinfer.models.encoders.registry import family_module
from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.models.loader import Checkpoint, DummyWeights
from roseinfer.parallel.group import RankGroup, Share, SingleRank
from roseinfer.quant.base import Build
from roseinfer.quant.select import choose_format


def load_encoder(
    folder: Path,
    spec: EncoderSpec,
    options: ModelConfig,
    device: torch.device,
    group: RankGroup | None = None,
) -> EncoderModel:
    """Return an encoder that is ready to run, as `load_model` does.

    Raise `ModelNotFoundError` without weights, and `UnsupportedModelError` naming a tensor that is missing, misshaped,
    unexpected or not finite. Raise `ConfigError` for a group of several processes, or a format that the device does not
    support.
    """
    group = group or SingleRank()
    if group.size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {group.size}, but {spec.architecture} runs in one process; "
            "`roseinfer serve --replicas` starts several engines"
        )
    dtype = options.dtype
    if dtype == "auto":
        dtype = spec.dtype if device.type == "cuda" else "float32"
    computed = getattr(torch, dtype)
    dummy = options.load_format == "dummy"
    build = Build(computed, device, group, choose_format(options.quantization, None, device, computed, dummy=dummy))
    network = family_module(spec.architecture).network(spec, build)
    encoder = EncoderModel(spec, build, network)
    if dummy:
        network.load(DummyWeights(options.seed, build))
        return encoder
    with _OldNames(folder, build) as checkpoint:
        network.load(checkpoint)
        checkpoint.refuse_unread(network.ignored)
        checkpoint.refuse_not_finite()
    return encoder


class _OldNames(Checkpoint):
    """Checkpoint whose norms may have the names that TensorFlow's BERT gave them: gamma and beta."""

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        super().read(old if name not in self and old in self else name, into, shard=shard, transposed=transposed)
