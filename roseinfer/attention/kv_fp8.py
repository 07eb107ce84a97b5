"""K and V in FP8 (e4m3fn): half the memory and traffic of 16 bits, with each number rounded to 1/17 at most.

A number is stored as the code nearest to number / scale, and read as code * scale (see `kv_scales`). Kernels widen
codes in registers before they multiply them. FP8 matrix units would be faster, but the precision of their sums is too
low for long contexts.
"""

import torch

from roseinfer.kernels.common.fp8_codes import CODES, MAX_CODE

# Values of --kv-cache-dtype.
AUTO, FP8 = "auto", "fp8"


def kv_dtype_of(kv_cache_dtype: str, computed: torch.dtype) -> torch.dtype:
    """Return the dtype of K and V in the store. kv_cache_dtype: as in `CacheConfig`. computed: the model's dtype."""
    return CODES if kv_cache_dtype == FP8 else computed


def narrow(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the codes of x [T, kv_heads, D], contiguous. scales: [kv_heads], None for 1.0.

    Numbers beyond the largest code become it; NaN stays NaN.
    """
    wide = x.to(torch.float32) if scales is None else x / scales[:, None]
    return wide.clamp(-MAX_CODE, MAX_CODE).to(CODES, memory_format=torch.contiguous_format)


class CodeWidener:
    """Converter of codes to numbers of `dtype`.

    On a CPU it uses a table with an entry for every two codes: PyTorch's own conversion takes eight times as long
    (2.13).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._pair = torch.int64 if dtype.itemsize == 4 else torch.int32
        self._table: torch.Tensor | None = None
        if device.type == "cpu":
            pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
            self._table = pairs.view(CODES).to(dtype).view(self._pair)

    def __call__(self, codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with the numbers of `codes`, which may be bytes. Both are contiguous and of one shape."""
        if self._table is None or codes.shape[-1] % 2:
            return out.copy_(codes.view(CODES))
        pairs = codes.view(torch.uint16).flatten().to(torch.int32)
        torch.index_select(self._table, 0, pairs, out=out.view(self._pair).flatten())
        return out
