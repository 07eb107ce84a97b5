"""Which attention implementation runs."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from roseinfer.attention.base import AttentionBackend, AttentionShape
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.kernels.availability import has_triton

# What `auto` takes the first of that can compute the model here.
_PREFERRED = ("triton", "torch")


def resolve_backend(
    name: str, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, kept: torch.dtype | None = None
) -> str:
    """The backend that `attention_backend` names, for a model with these layers. kept: of K and V, if not `dtype`.

    Raises `ConfigError` if it cannot run here, `UnsupportedModelError` if "auto" finds none that computes the layers.
    """
    if name != "auto":
        reason = why_not(name, specs, dtype, device, kept)
        if reason is not None:
            raise ConfigError(f"attention_backend {name} cannot be used: {reason}")
        return name
    reasons = {backend: why_not(backend, specs, dtype, device, kept) for backend in _PREFERRED}
    for backend, reason in reasons.items():
        if reason is None:
            return backend
    told = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    raise UnsupportedModelError(f"no attention backend computes this model here: {told}")


def why_not(
    name: str, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, kept: torch.dtype | None = None
) -> str | None:
    """Why the backend cannot compute these layers here, as the end of a sentence; None if it can."""
    if name == "torch":
        from roseinfer.attention import torch_backend

        return torch_backend.why_not(specs)
    if device.type != "cuda":
        return f"it needs a CUDA GPU, and the device is {device.type}"
    if not has_triton(device):
        return "it needs the triton package, which is not installed"
    if name == "triton":
        from roseinfer.attention import triton_backend

        return triton_backend.why_not(specs, device, kept or dtype)
    if kept is not None and kept != dtype:
        return "it keeps K and V as they are computed, and kv_cache_dtype asks for FP8"
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install 'roseinfer[flashinfer]'"
    from roseinfer.attention import flashinfer_backend

    return flashinfer_backend.why_not(specs, dtype, device)


def make_attention(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend called `name`, one of those that `resolve_backend` returns. Imports no other."""
    if name == "triton":
        from roseinfer.attention.triton_backend import TritonAttention

        return TritonAttention(shape)
    if name == "flashinfer":
        from roseinfer.attention.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(shape)
    from roseinfer.attention.torch_backend import TorchAttention

    return TorchAttention(shape.specs, shape.dtype)
