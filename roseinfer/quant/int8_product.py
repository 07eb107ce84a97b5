"""Products of int8 codes on a CPU: activations rounded by row (token), weights by output channel.

Sums are exact integers, so a row's result does not depend on the rows beside it. Two libraries do it that come with
PyTorch's builds for x86, each with a layout of its own for weights (docs/research/2026-11-kernels.md compares them).
FBGEMM, which also rounds the activations, is faster for few rows, oneDNN for more: on an EPYC 9005 oneDNN takes 1.2
times as long for one row of GPT-2's layers, .8 for 32 and for hundreds, and for the output head .7 from 16 on. It
needs instructions for such sums (VNNI), without which it is slower than in floats. Where it is fast and memory allows,
weights are kept for both.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch

from roseinfer.quant.cpu_matmul import SingleThread
from roseinfer.quant.int8_weight import MAX_CODE, Int8Weight

# Codes of activations if every pair of products must stay within 16 bits: 2 * 127 * 127 < 2^15, where an activation,
# which the instruction wants unsigned, is shifted to 1 .. 127.
_FEW_CODES = 63
# The fewest rows that oneDNN is faster for, in layers, and in a head, which has many more outputs.
_MANY_ROWS = 12
_MANY_ROWS_OF_HEAD = 4
# Rows that oneDNN's layout is tuned for; it is as good for 1 and for hundreds.
_TUNED_ROWS = 32
# A step between codes of a row whose largest magnitude is 1, as FBGEMM has it in float32, and how many of them are 1.
_STEP = torch.tensor(1 / MAX_CODE)
_STEPS = (1 / _STEP).item()
_SHIFT = torch.tensor(MAX_CODE + 1.0)
_WHOLE = float(1 << 23)
# Weights times rows (and 8 for reading them) that one thread is done with while it wakes the others: some 40 us. They
# must save more than that, or are not asked.
_WAKE_WORK = 11 << 20
_READ_ROWS = 8
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
        self._alone_rows = _alone_rows(weight, torch.get_num_threads())
        # Past PyTorch's look, in Python, for arguments that only compilers make: it takes as long as a small product.
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # A row of zeros becomes NaN, which is some code, and its result is multiplied by zero.
        largest = x.abs().amax(1, keepdim=True)
        with SingleThread() if x.shape[0] <= self._alone_rows else nullcontext():
            result: torch.Tensor = self._multiply(x / largest, 1 / self._max_code, self._max_code + 1, self._packed)
        return result.mul_(largest)


def _alone_rows(weight: Int8Weight, threads: int) -> int:
    """The most rows that one of so many threads multiplies alone: work W with W <= wake + W / threads."""
    if threads == 1:
        return 0
    return _WAKE_WORK * threads // (threads - 1) // weight.codes.numel() - _READ_ROWS


class OnednnProduct:
    """See `Int8Product`. The caller may drop `weight`.

    It rounds as FBGEMM does, bit for bit: x / largest * 127 + 128, a fused multiplication and addition, goes to the
    nearest whole number, or the even one of two. Past 2^23 float32 has no others, and the last eight bits are the code.
    """

    def __init__(self, weight: Int8Weight) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.codes, [_TUNED_ROWS, weight.codes.shape[1]])
        self._scales = weight.scales * _STEP
        self._zeros = torch.zeros(len(weight.scales), dtype=torch.int32)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(1, keepdim=True)
        shifted = torch.add(_SHIFT, x / largest, alpha=_STEPS).add_(_WHOLE)
        codes = shifted.view(torch.int32).to(torch.uint8)
        weight = (self._packed, self._scales, self._zeros, None)
        result: torch.Tensor = self._multiply(codes, 1.0, MAX_CODE + 1, *weight, 1.0, 0, torch.float32, "none", [], "")
        return result.mul_(largest)


class BothProducts:
    """See `Int8Product`. Few rows go to one library, more to the other, and get the same bits from both."""

    def __init__(self, weight: Int8Weight, many: int) -> None:
        """many: the fewest rows for oneDNN. The caller may drop `weight`."""
        self._many_rows = many
        self._few, self._many = FbgemmProduct(weight), OnednnProduct(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._few(x) if x.shape[0] < self._many_rows else self._many(x)


def layer_product(weight: Int8Weight, *, both: bool) -> Int8Product:
    """The fastest of one layout, or of two if `both` and the CPU gains by it."""
    if both and has_fast_onednn():
        return BothProducts(weight, _MANY_ROWS)
    return FbgemmProduct(weight)


def head_product(weight: Int8Weight, *, both: bool) -> Int8Product:
    """As `layer_product`, for many outputs."""
    if not has_fast_onednn():
        return FbgemmProduct(weight)
    return BothProducts(weight, _MANY_ROWS_OF_HEAD) if both else OnednnProduct(weight)


def unsupported_reason() -> str | None:
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
def has_fast_onednn() -> bool:
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
