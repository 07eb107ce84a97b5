"""Products of int8 codes on a CPU: activations rounded by row (token), weights by output channel.

Sums are exact integers, so a row's result does not depend on the rows beside it. Two libraries do it that come with
PyTorch's builds for x86, each with a layout of its own for weights. Measured on an EPYC 9005 with GPT-2's layers,
FBGEMM, which also rounds the activations, takes as long as oneDNN for 8 rows, 0.9 of its time for 1 and 1.2 for 32;
oneDNN gains with the number of outputs and needs instructions for such sums (VNNI), without which it is slower than in
floats. So FBGEMM is for layers, and oneDNN for the output head where it is fast (benchmarks/cpu_gemm.py measures both).
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch

from roseinfer.quant.int8_weight import MAX_CODE, Int8Weight

# Codes of activations if every pair of products must stay within 16 bits: 2 * 127 * 127 < 2^15, where an activation,
# which the instruction wants unsigned, is shifted to 1 .. 127.
_FEW_CODES = 63
# Rows that oneDNN's layout is tuned for; it is as good for 1 and for hundreds.
_TUNED_ROWS = 32
_ENGINE = "fbgemm"


class Int8Product(Protocol):
    """x [T, K] float32 -> x @ weight.T [T, N] float32, with both rounded to int8."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class FbgemmProduct:
    """See `Int8Product`. The caller may drop `weight`."""

    def __init__(self, weight: Int8Weight, max_code: int | None = None) -> None:
        """`max_code`: activations are rounded to -max_code .. max_code; by default `activation_codes`."""
        self._max_code = max_code or activation_codes()
        self._packed = _pack(weight)
        # Past PyTorch's look, in Python, for arguments that only compilers make: it takes as long as a small product.
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # A row of zeros becomes NaN, which is some code, and its result is multiplied by zero.
        largest = x.abs().amax(1, keepdim=True)
        result: torch.Tensor = self._multiply(x / largest, 1 / self._max_code, self._max_code + 1, self._packed)
        return result.mul_(largest)


class OnednnProduct:
    """See `Int8Product`. The caller may drop `weight`."""

    def __init__(self, weight: Int8Weight) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.codes, [_TUNED_ROWS, weight.codes.shape[1]])
        self._scales = weight.scales / MAX_CODE
        self._zeros = torch.zeros(len(weight.scales), dtype=torch.int32)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(1, keepdim=True)
        codes = (x / largest).mul_(MAX_CODE).round_().to(torch.int8)
        shifted = codes.view(torch.uint8).add_(MAX_CODE + 1)  # modulo 256, which is right
        weight = (self._packed, self._scales, self._zeros, None)
        result: torch.Tensor = self._multiply(
            shifted, 1.0, MAX_CODE + 1, *weight, 1.0, 0, torch.float32, "none", [], ""
        )
        return result.mul_(largest)


def head_product(weight: Int8Weight) -> Int8Product:
    """The faster product for many outputs."""
    return OnednnProduct(weight) if _has_fast_onednn() else FbgemmProduct(weight)


def why_not() -> str | None:
    """What is missing here, as the end of a sentence; None if int8 runs."""
    if _ENGINE not in torch.backends.quantized.supported_engines:
        return "this PyTorch lacks FBGEMM, which its builds for x86 have"
    try:
        activation_codes()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


@cache
def activation_codes() -> int:
    """The largest code of activations whose sums are exact on this CPU: 127, or 63 where it lacks VNNI.

    Without these instructions two products are added in 16 bits, which saturate, so activations get 7 bits. This is
    tried out, by the largest sums there are. Raises RuntimeError if neither is exact.
    """
    for codes in (MAX_CODE, _FEW_CODES):
        if _is_exact(partial(FbgemmProduct, max_code=codes), codes):
            return codes
    raise RuntimeError("this CPU's sums of int8 products are not exact")


@cache
def _has_fast_onednn() -> bool:
    """Where oneDNN's sums of eight bits are exact, it has instructions for them."""
    return torch.backends.mkldnn.is_available() and _is_exact(OnednnProduct, MAX_CODE)


def _is_exact(make: Callable[[Int8Weight], Int8Product], codes: int) -> bool:
    depth = 256
    weight = torch.full((64, depth), MAX_CODE, dtype=torch.int8)
    weight[::2] *= -1
    product = make(Int8Weight(weight, torch.ones(64)))
    x = torch.full((4, depth), float(codes))
    x[::2] *= -1
    return torch.allclose(product(x), x @ weight.T.float(), rtol=1e-5)


def _pack(weight: Int8Weight) -> Any:
    """`weight` in FBGEMM's layout, as an object that only its product reads."""
    previous = torch.backends.quantized.engine
    zeros = torch.zeros(len(weight.scales), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
        tensor = torch._make_per_channel_quantized_tensor(weight.codes, weight.scales, zeros, 0)
    torch.backends.quantized.engine = _ENGINE
    try:
        return torch.ops.quantized.linear_prepack(tensor, None)
    finally:
        torch.backends.quantized.engine = previous
