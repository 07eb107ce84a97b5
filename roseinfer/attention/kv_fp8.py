"""K and V kept in FP8 (e4m3fn): half the memory and half the traffic of 16 bits, each number rounded to 1/17 at most.

A number is kept as the code nearest to number / scale, and is code * scale (see `kv_scales`). Codes are widened before
they are multiplied, by the kernels in registers: FP8 matrix units would be faster, but their sums are too short for
long contexts.
"""

import torch

from roseinfer.kernels.common.fp8_codes import CODES, MAX_CODE

# What --kv-cache-dtype may ask for.
AUTO, FP8 = "auto", "fp8"


def kv_dtype_of(kv_cache_dtype: str, computed: torch.dtype) -> torch.dtype:
    """Of K and V in the store, for a model that computes in `computed`. kv_cache_dtype: as in `CacheConfig`."""
    return CODES if kv_cache_dtype == FP8 else computed


def narrow(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The codes of x [T, kv_heads, D], contiguous. scales: [kv_heads], None for 1.0.

    What is beyond the largest code becomes it; what is not a number stays so.
    """
    wide = x.to(torch.float32) if scales is None else x / scales[:, None]
    return wide.clamp(-MAX_CODE, MAX_CODE).to(CODES, memory_format=torch.contiguous_format)


class CodeWidener:
    """Codes to numbers of `dtype`; on a CPU by a table: PyTorch's own conversion takes it eight times as long (2.13).

    The table has an entry for every two codes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._pair = torch.int64 if dtype.itemsize == 4 else torch.int32
        self._table: torch.Tensor | None = None
        if device.type == "cpu":
            pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
            self._table = pairs.view(CODES).to(dtype).view(self._pair)

    def __call__(self, codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with the numbers of `codes`, which may be given as bytes. Both contiguous, of one shape."""
        if self._table is None or codes.shape[-1] % 2:
            return out.copy_(codes.view(CODES))
        pairs = codes.view(torch.uint16).flatten().to(torch.int32)
        torch.index_select(self._table, 0, pairs, out=out.view(self._pair).flatten())
        return out
