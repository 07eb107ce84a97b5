"""Folders as sentence-transformers stores them: modules around a checkpoint of transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TRANSFORMER = "sentence_transformers.models.Transformer"


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def add_modules(
    folder: Path,
    pooling: dict[str, Any],
    *,
    dense: tuple[tuple[torch.Tensor, torch.Tensor | None, str], ...] = (),
    normalize: bool = True,
    max_seq_length: int | None = None,
    prompts: dict[str, str] | None = None,
) -> Path:
    """Add the files to a folder. `dense`: weight, bias and activation of each layer."""
    modules = [("", TRANSFORMER), ("1_Pooling", "sentence_transformers.models.Pooling")]
    write_json(folder / "1_Pooling" / "config.json", pooling)
    for number, (weight, bias, activation) in enumerate(dense, start=2):
        name = f"{number}_Dense"
        modules.append((name, "sentence_transformers.models.Dense"))
        config = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": bias is not None,
            "activation_function": activation,
        }
        write_json(folder / name / "config.json", config)
        tensors = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
        save_file(tensors, folder / name / "model.safetensors")
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": kind} for number, (path, kind) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)
    if max_seq_length is not None:
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})
    if prompts is not None:
        write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    return folder
