"""Which attention implementation runs."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.core.errors import ConfigError
from roseinfer.kernels.availability import has_triton


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend sizes its buffers for: rows and tokens of a step at most, tokens of a context at most."""

    heads: int
    kv_heads: int
    head_dim: int
    max_rows: int
    max_tokens: int
    max_model_len: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


def resolve_backend(name: str, device: torch.device) -> str:
    """The backend that `attention_backend` names. Raises `ConfigError` if it cannot run here."""
    if name == "auto":
        return "triton" if has_triton(device) else "torch"
    if name != "torch" and device.type != "cuda":
        raise ConfigError(f"attention_backend {name} needs a CUDA GPU, and the device is {device.type}")
    if name != "torch" and not has_triton(device):
        raise ConfigError(f"attention_backend {name} needs the triton package, which is not installed")
    if name == "flashinfer" and find_spec("flashinfer") is None:
        raise ConfigError(
            "attention_backend is flashinfer, which is not installed: pip install 'roseinfer[flashinfer]'"
        )
    return name


def make_attention(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend called `name`, one of those that `resolve_backend` returns."""
    if name == "triton":
        from roseinfer.attention.triton_backend import TritonAttention

        return TritonAttention(shape)
    if name == "flashinfer":
        from roseinfer.attention.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(shape)
    return TorchAttention()
