"""Bytes that each rank reads of a checkpoint: its slices, and the few tensors that all ranks hold."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.loaded import load
from tests.helpers.weights import Imagined

# Tensors that every rank needs whole. Biases of partial results belong to one rank.
WHOLE = ("norm.weight", "mlp.gate.weight", "q_norm.weight", "k_norm.weight")


class CountingFile:
    """A safetensors file that counts the bytes read from it, by tensor."""

    def __init__(self, file: Any, read_bytes: dict[str, int]) -> None:
        self._file, self._read_bytes = file, read_bytes

    def __enter__(self) -> "CountingFile":
        self._file.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.__exit__(*exc_info)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.count(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self, name, self._file.get_slice(name))

    def count(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._read_bytes[name] += tensor.nbytes
        return tensor


class CountingSlice:
    def __init__(self, file: CountingFile, name: str, view: Any) -> None:
        self._file, self._name, self._view = file, name, view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self._file.count(self._name, self._view[at])


def bytes_read_by(rank: int, size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    read_bytes: dict[str, int] = defaultdict(int)
    monkeypatch.setattr(
        "roseinfer.models.loader.safe_open", lambda *args, **more: CountingFile(safe_open(*args, **more), read_bytes)
    )
    load(folder, group=Imagined(rank, size))
    return read_bytes


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "qwen3-moe", "gpt2"])
def test_two_ranks_read_each_matrix_once(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_reference(make_reference(family), tmp_path)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in list(file.keys())}
    ranks = [bytes_read_by(rank, 2, folder, monkeypatch) for rank in range(2)]
    for name, tensor in stored.items():
        read = [rank[name] for rank in ranks]
        if name.endswith(WHOLE) or ".ln_" in name or "wpe" in name:
            assert read == [tensor.nbytes] * 2, name
        elif name.endswith("bias"):
            assert sum(read) == tensor.nbytes, name
        else:
            assert sum(read) == tensor.nbytes and max(read) <= 0.52 * tensor.nbytes, name  # 99 tokens are odd
