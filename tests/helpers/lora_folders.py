"""Random LoRA adapters in PEFT's format, written without the package's reader."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from roseinfer.config.hub import model_folder
from roseinfer.core.config.engine import ModelConfig

PREFIX = "base_model.model."
_TRANSPOSED = re.compile(r"\bh\.\d+\.")  # GPT-2's layers are [in, out]
Shapes = Mapping[str, tuple[int, int]]  # path of a module -> outputs, inputs


def linear_shapes(model: Path, modules: str = ".*") -> dict[str, tuple[int, int]]:
    """Return the shapes of a checkpoint's linear layers in its blocks. modules: pattern for the end of their names."""
    found = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and re.search(r"\.\d+\.", name) and re.fullmatch(rf".*\b({modules})", module):
            outs, ins = tensor.shape[::-1] if _TRANSPOSED.search(name) else tensor.shape
            found[module] = (outs, ins)
    return found


def write_adapter(
    folder: Path,
    shapes: Shapes,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.5,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    rslora: bool = False,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> dict[str, torch.Tensor]:
    """Write an adapter of all modules and return the change of each weight [out, in].

    ranks, alphas: of modules with such an end, in place of `rank` and `alpha`. size: of the changes' elements, about.
    fields: further ones of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors, changes = {}, {}
    for module, (outs, ins) in shapes.items():
        r = next((value for end, value in (ranks or {}).items() if module.endswith(end)), rank)
        a = next((value for end, value in (alphas or {}).items() if module.endswith(end)), alpha)
        scale = a / (math.sqrt(r) if rslora else r)
        # Elements of the result have a variance of `size`^2 / ins.
        deviation = math.sqrt(size / (scale * math.sqrt(r * ins)))
        first = (torch.randn(r, ins, generator=generator) * deviation).to(dtype)
        second = (torch.randn(outs, r, generator=generator) * deviation).to(dtype)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = first
        tensors[f"{PREFIX}{module}.lora_B.weight"] = second
        changes[module] = scale * (second.double() @ first.double())
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "bias": "none"}
    config |= {"rank_pattern": dict(ranks or {}), "alpha_pattern": dict(alphas or {}), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return changes


def write_tiny_adapter(folder: Path, seed: int, rank: int = 4) -> None:
    """Write an adapter that changes the embedded model's answers."""
    shapes = linear_shapes(model_folder(ModelConfig(model="tiny")), "q_proj|v_proj|down_proj")
    write_adapter(folder, shapes, seed=seed, rank=rank)


def merge(model: Path, changes: Mapping[str, torch.Tensor], into: Path) -> Path:
    """Write a copy of a checkpoint with merged changes."""
    into.mkdir(parents=True)
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (into / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    for module, change in changes.items():
        name = f"{module}.weight"
        change = change.T if _TRANSPOSED.search(name) else change
        tensors[name] = (tensors[name].double() + change).to(tensors[name].dtype).contiguous()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into
