"""Models of small folders, loaded on a CPU, and their logits of one prompt."""

from pathlib import Path
from typing import Any

import torch

from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import load_model
from roseinfer.models.spec import ModelSpec
from tests.helpers.batches import HandRow, HandRunner

TOKENS = [5, 17, 3, 88, 42, 9, 1, 60]


def load(folder: Path, spec: ModelSpec | None = None, **more: Any) -> CausalLM:
    """Return the model in `folder`, in float32 unless `more` says otherwise. spec: default: as config.json says."""
    options = {"dtype": "float32", "device": torch.device("cpu"), "load_format": "auto", "seed": 0, **more}
    return load_model(folder, spec or read_model_spec(folder), **options)


def logits(model: CausalLM) -> torch.Tensor:
    """Return the logits that follow each of `TOKENS`."""
    runner = HandRunner(model)
    count = len(TOKENS)
    return runner.run([HandRow(tokens=TOKENS, table=runner.blocks.table(count), start=0, count=count)])[0]
