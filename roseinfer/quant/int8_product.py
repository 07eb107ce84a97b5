"""Products of int8 codes on a CPU: activations rounded by row (token), weights by output channel.

Sums are exact integers, so a row's result does not depend on the other rows. Two libraries in PyTorch's builds for x86
do it, each with a weight layout of its own (docs/research/2026-11-kernels.md compares them). FBGEMM, which also rounds
the activations, is faster for few rows, oneDNN for more. On an EPYC 9005, oneDNN takes 1.2 times as long for one row of
GPT-2's layers and 0.8 times for 32 rows and more; for the output head it takes 0.7 times from 16 rows on. Without VNNI
instructions oneDNN is slower than floats. With them, and if memory allows, weights are stored in both layouts.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch

from roseinfer.quant.cpu_matmul import SingleThread
from roseinfer.quant.int8_weight import MAX_CODE, Int8Weight

# Largest code of activations if every pair of products must stay within 16 bits: 2 * 127 * 127 < 2^15. The instruction
# takes unsigned activations, so they are shifted to 1 .. 127.
_MAX_CODE_7_BITS = 63
# The fewest rows for which oneDNN is faster, in layers and in a head, which has many more outputs.
_MIN_ONEDNN_ROWS = 12
_MIN_HEAD_ROWS = 4
# Rows that oneDNN's layout is tuned for; it is as good for 1 row and for hundreds.
_TUNED_ROWS = 32
# FBGEMM's float32 step between the codes of a row with a largest magnitude of 1, and the number of steps in 1.
_STEP = torch.tensor(1 / MAX_CODE)
_STEPS_IN_ONE = (1 / _STEP).item()
_SHIFT = torch.tensor(MAX_CODE + 1.0)
_WHOLE = float(1 << 23)
# Weights times rows (and 8 for reading them) that one thread finishes while it starts the others: some 40 us. More
# threads have to save more than that.
_MIN_THREAD_PRODUCTS = 11 << 20
_READ_ROWS = 8
ENGINE = "fbgemm"


class Int8Product(Protocol):
    """Product x [T, K] float32 -> x @ weight.T [T, N] float32, with both rounded to int8."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class FbgemmProduct:
    """`Int8Product` by FBGEMM. The caller may drop `weight`."""

    def __init__(self, weight: Int8Weight, max_code: int | None = None) -> None:
        """max_code: activations are rounded to -max_code .. max_code; default: `activation_codes`."""
        self._max_code = max_code or activation_codes()
        self._packed = _pack(weight)
        self._alone_rows = max_alone_rows(weight, torch.get_num_threads())
        # The overload is called directly: the dispatch in Python takes as long as a small product.
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # A row of zeros becomes NaN, that is an arbitrary code; its result is multiplied by zero.
        largest = x.abs().amax(1, keepdim=True)
        with SingleThread() if x.shape[0] <= self._alone_rows else nullcontext():
            result: torch.Tensor = self._multiply(x / largest, 1 / self._max_code, self._max_code + 1, self._packed)
        return result.mul_(largest)


def max_alone_rows(weight: Int8Weight, threads: int) -> int:
    """Return the most rows that one thread multiplies alone: work W with W <= start-up + W / threads."""
    if threads == 1:
        return 0
    return _MIN_THREAD_PRODUCTS * threads // (threads - 1) // weight.codes.numel() - _READ_ROWS


class OnednnProduct:
    """`Int8Product` by oneDNN. The caller may drop `weight`.

    It rounds exactly as FBGEMM does: x / largest * 127 + 128, a fused multiply-add, is rounded to the nearest integer,
    ties to even. Past 2^23, float32 has only integers, and the last eight bits are the code.
    """

    def __init__(self, weight: Int8Weight) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.codes, [_TUNED_ROWS, weight.codes.shape[1]])
        self._scales = weight.scales * _STEP
        self._zeros = torch.zeros(len(weight.scales), dtype=torch.int32)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(1, keepdim=True)
        shifted = torch.add(_SHIFT, x / largest, alpha=_STEPS_IN_ONE).add_(_WHOLE)
        return self.of_codes(shifted.view(torch.int32).to(torch.uint8)).mul_(largest)

    def of_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the product [T, N] float32 of rows with a largest magnitude of 1, given as codes [T, K] uint8 that are
        shifted by 128.
        """
        weight = (self._packed, self._scales, self._zeros, None)
        result: torch.Tensor = self._multiply(codes, 1.0, MAX_CODE + 1, *weight, 1.0, 0, torch.float32, "none", [], "")
        return result


class BothProducts:
    """`Int8Product` by both libraries: few rows go to one, more to the other, with equal bits from both."""

    def __init__(self, weight: Int8Weight, many: int) -> None:
        """many: the fewest rows for oneDNN. The caller may drop `weight`."""
        self._many_rows = many
        self._few, self._many = FbgemmProduct(weight), OnednnProduct(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._few(x) if x.shape[0] < self._many_rows else self._many(x)


def layer_product(weight: Int8Weight, *, both: bool) -> Int8Product:
    """Return the fastest product with one layout, or with two if `both` is set and the CPU gains from it."""
    if both and has_fast_onednn():
        return BothProducts(weight, _MIN_ONEDNN_ROWS)
    return FbgemmProduct(weight)


def head_product(weight: Int8Weight, *, both: bool) -> Int8Product:
    """Return the fastest product for a head, which has many outputs, like `layer_product`."""
    if not has_fast_onednn():
        return FbgemmProduct(weight)
    return BothProducts(weight, _MIN_HEAD_ROWS) if both else OnednnProduct(weight)


def many_product(weight: Int8Weight, *, both: bool) -> tuple[OnednnProduct | None, int]:
    """Return oneDNN's product, None unless `both` is set and the CPU gains from it, and its fewest rows.

    It takes codes of 8 bits only, where the product of few rows may need codes of 7.
    """
    usable = both and has_fast_onednn() and activation_codes() == MAX_CODE
    return (OnednnProduct(weight) if usable else None), _MIN_ONEDNN_ROWS


def unsupported_reason() -> str | None:
    """Return the missing requirement, as the end of a sentence; None if int8 is supported."""
    if ENGINE not in torch.backends.quantized.supported_engines:
        return "this PyTorch lacks FBGEMM, which its builds for x86 have"
    try:
        activation_codes()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


@cache
def activation_codes() -> int:
    """Return the largest code of activations whose sums are exact on this CPU: 127, or 63 without VNNI.

    Without these instructions two products are added in 16 bits, which saturate, so activations get 7 bits. The largest
    possible sums are computed to find out. Raises RuntimeError if neither is exact.
    """
    for codes in (MAX_CODE, _MAX_CODE_7_BITS):
        if is_exact(partial(FbgemmProduct, max_code=codes), codes):
            return codes
    raise RuntimeError("this CPU's sums of int8 products are not exact")


@cache
def has_fast_onednn() -> bool:
    """Return True if oneDNN's sums of eight bits are exact: then the CPU has instructions for them."""
    return torch.backends.mkldnn.is_available() and is_exact(OnednnProduct, MAX_CODE)


def is_exact(make: Callable[[Int8Weight], Int8Product], codes: int) -> bool:
    depth = 256
    weight = torch.full((64, depth), MAX_CODE, dtype=torch.int8)
    weight[::2] *= -1
    product = make(Int8Weight(weight, torch.ones(64)))
    x = torch.full((4, depth), float(codes))
    x[::2] *= -1
    return torch.allclose(product(x), x @ weight.T.float(), rtol=1e-5)


def _pack(weight: Int8Weight) -> Any:
    """Return `weight` in FBGEMM's layout, as an object that only its product can read."""
    previous = torch.backends.quantized.engine
    zeros = torch.zeros(len(weight.scales), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
        tensor = torch._make_per_channel_quantized_tensor(weight.codes, weight.scales, zeros, 0)
    torch.backends.quantized.engine = ENGINE
    try:
        return torch.ops.quantized.linear_prepack(tensor, None)
    finally:
        torch.backends.quantized.engine = previous
