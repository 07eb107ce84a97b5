"""Choice of each token's experts, with the norm before the router.

`route` takes one launch, or two for many tokens. `router_logits` returns only the logits, for `experts_few`, which
orders them itself.

Choosing is discontinuous: a rounded logit may change the expert, and everything after it. So the router's input is not
rounded to 16 bits. x itself is multiplied by `RouterTerms`, whose products are exact, and the sums are divided by its
root mean square. Sums, softmax and weights are float32.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton
from roseinfer.kernels.experts.route_many import route_choice_kernel, route_products_kernel
from roseinfer.kernels.experts.route_parts import choose, norm_rows, partial_logits, prefetch_terms
from roseinfer.kernels.experts.route_terms import RouterTerms
from roseinfer.kernels.linear.fp8_rows import Fp8Rows
from roseinfer.kernels.linear.skinny import SkinnyNorm
from roseinfer.kernels.linear.small_product import multiply_row, read_factors

# Fewest tokens of a program: `arrived` has a counter for each so many.
MIN_PROGRAM_TOKENS = 16
# Elements of x that a norming program holds at once: 64 a thread.
_ROW_ELEMENTS = 8192


class RouteConfig(NamedTuple):
    """Division of the router's work: a program takes so many tokens, experts, and one of `splits` of the columns.

    columns: taken at a time. stages: loads in flight. rows: of a program in a launch of its own, which norms and
    chooses; 0: everything in one launch.
    """

    tokens: int
    experts: int
    splits: int
    columns: int
    stages: int
    warps: int
    rows: int = 0


def _choose_config(tokens: int, experts: int) -> RouteConfig:
    """Return the fastest config on an H200 (torch 2.11, Triton 3.6).

    Up to 128 tokens were measured alone, at 8, 16, 32, 64 and 128 with 32 experts of 2,880 columns, and with 128 and
    256 experts of 2,048 (2026-11-28); more in layers of Qwen3-30B-A3B in FP8, at 256, 536, 800, 1,048, 2,048, 4,096 and
    8,192 (2026-11-23). In one launch the last program chooses for all tokens of its product, which pays for few experts
    only.
    """
    if tokens <= 128:
        if experts <= 32:
            return RouteConfig(16, 32, 12, 256, 3, 4)
        if experts <= 128:
            return (
                RouteConfig(16, 32, 8, 128, 3, 4, rows=1) if tokens <= 64 else RouteConfig(16, 32, 4, 256, 3, 4, rows=1)
            )
        return RouteConfig(16, 32, 4, 128 if tokens <= 32 else 256, 3, 4, rows=1)
    if tokens <= 256:
        return RouteConfig(64, 128, 4, 64, 3, 4, rows=4)
    if tokens <= 1280:
        return RouteConfig(32, 64, 4, 64, 3, 4, rows=4)
    return RouteConfig(64, 128, 4, 64, 3, 4, rows=4) if tokens <= 4608 else RouteConfig(128, 128, 2, 64, 4, 8, rows=4)


class Routed(NamedTuple):
    """Choice of experts. ids: [T, k] int32, by weight, largest first. weights: [T, k] float32. With a shared expert
    both have one more column, for that.
    """

    ids: torch.Tensor
    weights: torch.Tensor


def route_reference(
    x: torch.Tensor,
    norm: SkinnyNorm,
    router: torch.Tensor,
    top_k: int,
    renormalise: bool,
    bias: torch.Tensor | None = None,
    shared: bool = False,
) -> Routed:
    """`route` in plain torch, by the router [E, H] itself."""
    wide = F.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps)
    logits = F.linear(wide, router.float(), bias)
    weights, ids = logits[:, : len(router) - shared].softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if shared:
        weights = torch.cat((weights, logits[:, -1:].sigmoid()), -1)
        ids = torch.cat((ids, torch.full_like(ids[:, :1], len(router) - 1)), -1)
    return Routed(ids.int(), weights)


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def route_kernel(
    x_ptr,
    norm_ptr,
    terms_ptr,
    scale_ptr,
    bias_ptr,
    sums_ptr,
    factors_ptr,
    arrived_ptr,
    ids_ptr,
    weights_ptr,
    normed_ptr,
    scales_ptr,
    tokens,
    stride_x,
    scale_stride,
    eps,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Multiply in the first programs, each for TOKENS tokens and some experts over some columns; norm rows in the
    others.

    A norming program takes ROWS rows. The last program of TOKENS tokens to finish chooses, CHOSEN tokens at a time.
    """
    ROUTER_ROWS: tl.constexpr = E + SHARED
    TILES: tl.constexpr = (ROUTER_ROWS + BLOCK_E - 1) // BLOCK_E
    PRODUCTS: tl.constexpr = TILES * SPLITS
    NORMS: tl.constexpr = TOKENS // ROWS
    products = (tokens + TOKENS - 1) // TOKENS * PRODUCTS
    number = tl.program_id(0)
    multiplies = number < products
    together = number // PRODUCTS if multiplies else (number - products) // NORMS
    first = together * TOKENS
    first_expert, split = number % TILES * BLOCK_E, number // TILES % SPLITS
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch_terms(terms_ptr, number < PRODUCTS, first_expert, split, ROUTER_ROWS, H, BLOCK_E, SPAN)
        tl.extra.cuda.gdc_wait()
    if multiplies:
        partial_logits(
            x_ptr, terms_ptr, sums_ptr, tokens, stride_x, first, first_expert, split,
            ROUTER_ROWS, H, SPAN, TOKENS, BLOCK_E, BLOCK_K, STAGES, H != SPAN * SPLITS, COMPILED,
        )  # fmt: skip
    else:
        row = first + (number - products) % NORMS * ROWS
        end = tl.minimum(first + TOKENS, tokens)
        if row < end:
            rstd = norm_rows(
                x_ptr, norm_ptr, normed_ptr, scales_ptr, row, end, stride_x, scale_stride, eps, H, ROWS, GROUPS, NORMED
            )
            token = row + tl.arange(0, ROWS)
            tl.store(factors_ptr + token, rstd / tl.load(scale_ptr), mask=token < end)

    tl.debug_barrier()  # all threads have written before one of them counts
    arrived = arrived_ptr + together
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == PRODUCTS + NORMS - 1:
        tl.store(arrived, 0)
        for start in tl.range(first, tl.minimum(first + TOKENS, tokens), CHOSEN):
            token = tl.minimum(start + tl.arange(0, CHOSEN), tokens - 1)
            factors = tl.load(factors_ptr + token, cache_modifier=".cg")
            choose(
                sums_ptr, factors, bias_ptr, ids_ptr, weights_ptr, start, tokens,
                SPLITS, E, E_PAD, SHARED, CHOSEN, TOP_K, RENORMALISE, HAS_BIAS,
            )  # fmt: skip


@triton.jit
def logits_kernel(
    x_ptr,
    norm_ptr,
    router_ptr,
    bias_ptr,
    logits_ptr,
    rstd_ptr,
    stride_x,
    eps,
    E: tl.constexpr,
    H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute, in program (t, i), token t's logits of BLOCK_E experts, and 1 / its root mean square."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    factors = read_factors(router_ptr, norm_ptr, expert, E, H, BLOCK_K, "rms")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # After the wait: a kernel that starts now finds everything older than this one done.
        tl.extra.cuda.gdc_launch_dependents()
    logits, rstd = multiply_row(x_ptr + token * stride_x, factors, eps, H, BLOCK_E, BLOCK_K)
    logits *= rstd
    if HAS_BIAS:
        logits += tl.load(bias_ptr + expert, mask=expert < E, other=0.0)
    tl.store(logits_ptr + token * E + expert, logits, mask=expert < E)
    if tl.program_id(1) == 0:
        tl.store(rstd_ptr + token, rstd)


def route(
    x: torch.Tensor,
    norm: SkinnyNorm,
    terms: RouterTerms,
    top_k: int,
    renormalise: bool,
    arrived: torch.Tensor,
    normed: torch.Tensor | Fp8Rows | None = None,
    config: RouteConfig | None = None,
    bias: torch.Tensor | None = None,
    shared: bool = False,
) -> Routed:
    """Return the largest `top_k` of softmax(norm(x) @ router.T + bias) of each token; `renormalise`: divided by their
    sum.

    x: [T, H], its rows may be apart. norm: an RMSNorm. terms: of it and the router, in x's dtype. arrived: int32, at
    least T / 16 rounded up, all zero before and after; launches of one stream may share it. normed: [T, H], contiguous,
    becomes norm(x), or that rounded with a scale for each 128 columns (H a multiple of 128). bias: [E] float32. shared:
    the last expert is none to choose: it follows in an own column, whose weight is the sigmoid of its logit. Starts
    early (see `early_start`). A row's results depend on the other rows only by their number, which decides how sums are
    split.
    """
    (tokens, hidden), rows_of_router = x.shape, terms.values.shape[1]
    experts, places = rows_of_router - shared, top_k + shared
    assert norm.bias is None and x.stride(1) == 1 and x.dtype == terms.values.dtype and top_k <= experts
    assert terms.values.is_contiguous() and arrived.numel() >= cdiv(tokens, MIN_PROGRAM_TOKENS)
    assert not (shared and bias is not None)
    ids = torch.empty((tokens, places), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, places), dtype=torch.float32, device=x.device)
    wanted, scales = (normed.codes, normed.scales) if isinstance(normed, Fp8Rows) else (normed, None)
    assert scales is None or scales.shape[1] * SCALE_BLOCK == hidden
    if not tokens:
        return Routed(ids, weights)
    config = config or _choose_config(tokens, experts)
    splits = min(config.splits, cdiv(hidden, config.columns))
    span = cdiv(cdiv(hidden, splits), config.columns) * config.columns
    groups, padded = next_power_of_2(cdiv(hidden, 128)), next_power_of_2(experts)
    most_rows = max(1, _ROW_ELEMENTS // (groups * 128))
    block_e = min(config.experts, max(16, padded))
    products = cdiv(rows_of_router, block_e) * splits
    sums = torch.empty((splits, tokens, rows_of_router), dtype=torch.float32, device=x.device)
    out, scale_stride = (ids, weights, wanted, scales), 0 if scales is None else scales.stride(1)
    multiplies: dict[str, Any] = {
        "E": experts,
        "SHARED": shared,
        "H": hidden,
        "TOKENS": config.tokens,
        "BLOCK_E": block_e,
        "SPLITS": splits,
        "SPAN": span,
        "BLOCK_K": config.columns,
        "STAGES": config.stages,
        "COMPILED": x.is_cuda,
        "num_warps": config.warps,
    }
    chooses: dict[str, Any] = {
        "E": experts,
        "E_PAD": padded,
        "SHARED": shared,
        "TOP_K": top_k,
        "H": hidden,
        "SPLITS": splits,
        "GROUPS": groups,
        "RENORMALISE": renormalise,
        "HAS_BIAS": bias is not None,
        "NORMED": "none" if wanted is None else "plain" if scales is None else "codes",
    } | early_start.options(x.device)
    if config.rows:
        rows = min(config.rows, most_rows)
        route_products_kernel[(cdiv(tokens, config.tokens) * products,)](
            x, terms.values, sums, tokens, x.stride(0), **multiplies, **early_start.options(x.device)
        )
        route_choice_kernel[(cdiv(tokens, rows),)](
            x, norm.weight, terms.scale, bias, sums, *out, tokens, x.stride(0), scale_stride, norm.eps,
            ROWS=rows, **chooses, num_warps=4,
        )  # fmt: skip
        return Routed(ids, weights)
    rows = min(4 if tokens > 128 else 2, most_rows)
    factors = torch.empty(tokens, dtype=torch.float32, device=x.device)
    route_kernel[(cdiv(tokens, config.tokens) * (products + config.tokens // rows),)](
        x, norm.weight, terms.values, terms.scale, bias, sums, factors, arrived, *out,
        tokens, x.stride(0), scale_stride, norm.eps,
        ROWS=rows,
        CHOSEN=min(config.tokens, config.warps * max(1, min(4, 1024 // padded))),
        maxnreg=None if config.warps == 4 else 128,  # leaves room for norms beside a product
        **(multiplies | chooses),
    )  # fmt: skip
    return Routed(ids, weights)


def router_logits(
    x: torch.Tensor, norm: SkinnyNorm, router: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm(x) @ router.T + bias [T, E] and 1 / the root mean square of each row [T], for few tokens.

    Both are float32. x: [T, H], its rows may be apart. norm: an RMSNorm. router: [E, H], contiguous. bias: [E] float32.
    A row's results do not depend on the other rows.
    """
    (tokens, hidden), experts = x.shape, router.shape[0]
    assert norm.bias is None and x.stride(1) == 1 and router.is_contiguous()
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block_e = 2 if tokens <= 2 else 4
    logits_kernel[(tokens, cdiv(experts, block_e))](
        x,
        norm.weight,
        router,
        bias,
        logits,
        rstd,
        x.stride(0),
        norm.eps,
        E=experts,
        H=hidden,
        BLOCK_E=block_e,
        BLOCK_K=min(2048, next_power_of_2(hidden)),
        HAS_BIAS=bias is not None,
        num_warps=4,
        **early_start.options(x.device),
    )
    return logits, rstd
