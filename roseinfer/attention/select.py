"""Choice of the attention backend."""

import logging
from collections.abc import Sequence

import torch

from roseinfer.attention.base import AttentionBackend, AttentionShape
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.kernels.common.availability import has_triton

log = logging.getLogger(__name__)

# Backends that "auto" tries, in this order.
_PREFERRED = ("triton", "torch")
# Accepted for compatibility; treated as "auto".
_REMOVED = ("flashinfer",)


def resolve_backend(
    name: str,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Return the backend to use for layers of these specs. kv_dtype: dtype of K and V in the cache, if not `dtype`.

    Raise ConfigError if the named backend cannot run here, UnsupportedModelError if "auto" finds no backend.
    """
    if name in _REMOVED:
        backend = resolve_backend("auto", specs, dtype, device, kv_dtype)
        log.warning("attention backend %r was removed; using %r", name, backend)
        return backend
    if name != "auto":
        reason = unsupported_reason(name, specs, dtype, device, kv_dtype)
        if reason is not None:
            raise ConfigError(f"attention_backend {name} cannot be used: {reason}")
        return name
    reasons = {backend: unsupported_reason(backend, specs, dtype, device, kv_dtype) for backend in _PREFERRED}
    for backend, reason in reasons.items():
        if reason is None:
            return backend
    details = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    raise UnsupportedModelError(f"no attention backend supports this model on this machine: {details}")


def unsupported_reason(
    name: str,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Return why the backend does not support these layers here, as the end of a sentence; None if it does."""
    if name == "torch":
        from roseinfer.attention import torch_backend

        return torch_backend.unsupported_reason(specs)
    if device.type != "cuda":
        return f"it needs a CUDA GPU, and the device is {device.type}"
    if not has_triton(device):
        return "it needs the triton package, which is not installed"
    from roseinfer.attention import triton_backend

    return triton_backend.unsupported_reason(specs, device, kv_dtype or dtype)


def make_attention(name: str, shape: AttentionShape) -> AttentionBackend:
    """Return the backend called `name`, a result of `resolve_backend`. Imports no other backend."""
    if name == "triton":
        from roseinfer.attention.triton_backend import TritonAttention

        return TritonAttention(shape)
    from roseinfer.attention.torch_backend import TorchAttention

    return TorchAttention(shape.specs, shape.dtype)
