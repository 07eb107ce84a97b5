"""What each rank reads of a checkpoint: its slices, and the little that all of them hold."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import load_model
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.weights import Imagined

# What every rank needs all of. Biases of partial results are one rank's.
WHOLE = ("norm.weight", "mlp.gate.weight", "q_norm.weight", "k_norm.weight")


class Counted:
    """A safetensors file that notes the bytes that are taken out of it, by tensor."""

    def __init__(self, file: Any, taken: dict[str, int]) -> None:
        self._file, self._taken = file, taken

    def __enter__(self) -> "Counted":
        self._file.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.__exit__(*exc_info)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._note(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self, name, self._file.get_slice(name))

    def _note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._taken[name] += tensor.nbytes
        return tensor


class CountedSlice:
    def __init__(self, file: Counted, name: str, view: Any) -> None:
        self._file, self._name, self._view = file, name, view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self._file._note(self._name, self._view[at])


def taken_by(rank: int, size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    taken: dict[str, int] = defaultdict(int)
    monkeypatch.setattr(
        "roseinfer.models.loader.safe_open", lambda *args, **more: Counted(safe_open(*args, **more), taken)
    )
    options: dict[str, Any] = {"dtype": "float32", "device": torch.device("cpu"), "load_format": "auto", "seed": 0}
    load_model(folder, read_model_spec(folder), group=Imagined(rank, size), **options)
    return taken


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "qwen3-moe", "gpt2"])
def test_two_ranks_read_each_matrix_once(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_reference(make_reference(family), tmp_path)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in list(file.keys())}
    ranks = [taken_by(rank, 2, folder, monkeypatch) for rank in range(2)]
    for name, tensor in stored.items():
        read = [rank[name] for rank in ranks]
        if name.endswith(WHOLE) or ".ln_" in name or "wpe" in name:
            assert read == [tensor.nbytes] * 2, name
        elif name.endswith("bias"):
            assert sum(read) == tensor.nbytes, name
        else:
            assert sum(read) == tensor.nbytes and max(read) <= 0.52 * tensor.nbytes, name  # 99 tokens are odd
