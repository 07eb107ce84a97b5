"""Experts on a GPU, in 16 bits, in FP8 or in four bits (MXFP4, NVFP4 and int4).

For few tokens, programs take a slice of one expert for one token each. More tokens are sorted by expert and multiplied
in tiles. In FP8 few tokens widen the weight in registers, and more are rounded to FP8 themselves, as in `fp8_matmul`.
Weights in four bits are always widened in registers.
"""

from collections.abc import Callable, Sequence

import torch

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.core.support import EXPERTS
from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv
from roseinfer.kernels.experts.few_tokens import ExpertWeights, experts_few, few_pays
from roseinfer.kernels.experts.pair_order import order_pairs
from roseinfer.kernels.experts.route import MIN_PROGRAM_TOKENS, route
from roseinfer.kernels.experts.route_terms import RouterTerms, split_router
from roseinfer.kernels.experts.tile_configs import choose_experts_config
from roseinfer.kernels.experts.tiles import Stack, add_experts, down_product, gate_up_product, spread
from roseinfer.kernels.linear.fp8_rows import Fp8Rows
from roseinfer.kernels.linear.skinny import SkinnyNorm
from roseinfer.parallel.group import Share
from roseinfer.quant.base import ExpertNames, ExpertShape, Norm, WeightPiece, WeightSource
from roseinfer.quant.experts import expert_pieces, read_router, read_router_bias

# Counters are allocated once for steps of up to so many tokens. Only an uncut prompt could be longer.
MAX_TOKENS = 1 << 17
# Reads the matrices of pieces, stacked in their order as if they were one expert's, without the dimension of experts.
Read = Callable[[Sequence[WeightPiece]], Stack]


class CudaExperts:
    """`Experts` with inputs and results in bfloat16 or float16. The result overwrites a residual."""

    def __init__(
        self,
        router: torch.Tensor,
        gate_up: Stack,
        down: Stack,
        shape: ExpertShape,
        router_bias: torch.Tensor | None = None,
    ) -> None:
        """router: [matrices, hidden] in the model's dtype. gate_up, down: this process's share of the width.
        router_bias: [count] float32.
        """
        self._router = router
        self._router_bias = router_bias
        self._gate_up = gate_up
        self._down = down
        self._shape = shape
        self._few = ExpertWeights(
            *(gate_up.weights, down.weights, gate_up.scales, down.scales),
            *(gate_up.bias, down.bias, gate_up.factors, down.factors),
        )
        self._arrived = _none_arrived(MAX_TOKENS, router.device)
        self._split: tuple[torch.Tensor, RouterTerms] | None = None  # with the norm's weight that they are for

    @property
    def four_bits(self) -> str:
        """Format of the matrices in four bits, "mxfp4", "int4" or "nvfp4"; empty without any."""
        return next((stack.scaled_by for stack in (self._gate_up, self._down) if stack.has_four_bits), "")

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        shape, tokens = self._shape, x.shape[0]
        if tokens == 0:
            return x if residual is None else residual
        skinny_norm = SkinnyNorm(norm.weight, norm.eps, norm.bias)
        if few_pays(tokens, self._few, shape.top_k):
            return experts_few(
                x,
                skinny_norm,
                self._router,
                self._few,
                top_k=shape.top_k,
                renormalise=shape.renormalise,
                activation=shape.activation,
                residual=residual,
                out=residual,
                router_bias=self._router_bias,
                shared=shape.shared,
            )
        return self._many(skinny_norm, x, residual)

    def _many(self, norm: SkinnyNorm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        shape, tokens, codes = self._shape, x.shape[0], self._gate_up.has_codes
        config = choose_experts_config(
            tokens, shape.top_k, shape.count, self._down.columns, codes=codes, four_bits=self.four_bits
        )
        rows: torch.Tensor | Fp8Rows
        if codes:
            rows = Fp8Rows.empty(tokens, shape.hidden, True, x.device)
        else:
            rows = torch.empty((tokens, shape.hidden), dtype=x.dtype, device=x.device)
        arrived = self._arrived if tokens <= MAX_TOKENS else _none_arrived(tokens, x.device)
        terms, bias = self._terms(norm), self._router_bias
        ids, weights = route(
            x, norm, terms, shape.top_k, shape.renormalise, arrived, normed=rows, bias=bias, shared=shape.shared
        )
        order = order_pairs(ids, shape.matrices, config.tile)
        if config.spread:
            rows = spread(rows, order, shape.places)
        h = gate_up_product(rows, self._gate_up, order, shape.places, shape.activation, config)
        del rows  # frees their memory for the next results
        parts = down_product(h, self._down, order, weights, config, x.dtype)
        return add_experts(parts, shape.places, residual)

    def _terms(self, norm: SkinnyNorm) -> RouterTerms:
        """Return the router's terms, made by the first call: the norm is the same in every call."""
        if self._split is None or self._split[0] is not norm.weight:
            self._split = norm.weight, split_router(norm, self._router)
        return self._split[1]


def _none_arrived(tokens: int, device: torch.device) -> torch.Tensor:
    """Return zeroed counters for the router."""
    return torch.zeros(cdiv(tokens, MIN_PROGRAM_TOKENS), dtype=torch.int32, device=device)


def load_cuda_experts(
    source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames, read: Read
) -> CudaExperts:
    """Load the experts of one layer. share: this process's part of their width.

    Raises `ConfigError` for an unsupported GPU or dtype, and `UnsupportedModelError` for unsupported sizes.
    """
    build = source.build
    check_device(build.device, build.dtype)
    router, router_bias = read_router(source, shape, names, build.dtype), read_router_bias(source, shape, names)
    gate_up, down = (_stacked(shape.matrices, read(pieces)) for pieces in expert_pieces(source, shape, share, names))
    if gate_up.has_codes != down.has_codes:
        name = names.down.format(0)
        raise UnsupportedModelError(f"{name}: experts of which only some matrices are in FP8 are not supported")
    check_sizes(shape.hidden, share.width, codes=down.has_codes)
    return CudaExperts(router, gate_up, down, shape, router_bias)


def _stacked(count: int, whole: Stack) -> Stack:
    """Split one matrix, with the rows of `count` experts one after the other, into a stack."""
    weights, *others = (None if part is None else part.view(count, -1, *part.shape[1:]) for part in whole)
    assert weights is not None
    return Stack(weights, *others)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if these kernels do not support the device or dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError("on a GPU, models with experts need dtype=bfloat16 or dtype=float16")
    if device.type == "cuda" and not EXPERTS.runs_on(torch.cuda.get_device_capability(device)):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"models with experts need a GPU of compute capability 9.0 or more; {name} has less")


def check_sizes(hidden: int, width: int, *, codes: bool) -> None:
    """Raise `UnsupportedModelError` if the kernels do not support experts of `width` (this process's share)."""
    multiple = SCALE_BLOCK if codes else 8
    if hidden % multiple or width % multiple:
        raise UnsupportedModelError(
            f"experts of width {width} in a model of width {hidden} are not supported on a GPU"
            f"{' in FP8' if codes else ''}: both have to be multiples of {multiple}"
        )
