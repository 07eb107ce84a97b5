"""Models of small folders, loaded on a CPU, and their logits of one prompt."""

from pathlib import Path
from typing import Any

import torch

from roseinfer.core.config.engine import ModelConfig
from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.decoder import Decoder
from roseinfer.models.loader import load_model
from roseinfer.models.spec import ModelSpec
from roseinfer.parallel.group import RankGroup
from roseinfer.quant.base import WeightFormat
from tests.helpers.batches import HandRow, HandRunner

CPU = torch.device("cpu")
TOKENS = [5, 17, 3, 88, 42, 9, 1, 60]


def load(
    folder: Path,
    spec: ModelSpec | None = None,
    *,
    device: torch.device = CPU,
    group: RankGroup | None = None,
    dtype: str = "float32",
    weight_format: WeightFormat | None = None,
    steady_text: bool = False,
    **options: Any,
) -> Decoder:
    """Return the model in `folder`. spec: by default as config.json says. options: of `ModelConfig`."""
    spec, config = spec or read_model_spec(folder), ModelConfig(dtype=dtype, **options)
    return load_model(folder, spec, config, device, group, weight_format=weight_format, steady_text=steady_text)


def logits(model: CausalLM) -> torch.Tensor:
    """Return the logits that follow each of `TOKENS`."""
    runner = HandRunner(model)
    count = len(TOKENS)
    return runner.run([HandRow(tokens=TOKENS, table=runner.blocks.table(count), start=0, count=count)])[0]
