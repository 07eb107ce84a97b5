"""Which experts a token goes to, with the norm before the router, in one launch: `route`; their logits alone, for
`experts_few`, which puts them in order itself: `router_logits`.

Choosing is no product: a rounded logit may change the expert, and all that follows. So the normed input is not rounded
to 16 bits for it: x itself is multiplied by `RouterTerms`, whose products are exact, and the sums are divided by its
root mean square. Sums, softmax and weights are float32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from roseinfer.kernels import early_start
from roseinfer.kernels.expert_order import read_logits, sort_keys
from roseinfer.kernels.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.fp8_rows import Fp8Rows, code_of, scale_of
from roseinfer.kernels.route_terms import RouterTerms
from roseinfer.kernels.skinny_kernel import prefetch_rows
from roseinfer.kernels.skinny_linear import SkinnyNorm
from roseinfer.kernels.triton_support import cdiv, next_power_of_2, tl, triton

# Tokens of a program at least: `arrived` counts for each so many.
TOKENS = 16
# Elements of x that a program holds at once where it norms rows: 64 a thread.
_ROW_ELEMENTS = 8192


class RouteCut(NamedTuple):
    """A program takes so many tokens and experts and one of `splits` of the columns, `columns` at a time, of which
    `stages` are on their way."""

    tokens: int
    experts: int
    splits: int
    columns: int
    stages: int
    warps: int


def _cut_of(tokens: int) -> RouteCut:
    """The fastest for 128 experts and 2,048 columns on an H200 (torch 2.11, Triton 3.6; 2026-11-23), measured at 1, 8,
    16, 64, 256, 512, 1,024, 2,048, 2,304 and 8,192 tokens: 5.9 us at 16, 10 at 256, 26 at 2,048, 59 at 8,192. Whoever
    comes last adds up all splits of its tokens, so there are few of those."""
    if tokens <= 32:
        return RouteCut(16, 32, 4, 256, 3, 4)
    if tokens <= 256:
        return RouteCut(16, 64, 4, 256, 3, 4)
    if tokens <= 512:
        return RouteCut(32, 64, 4, 128, 3, 4)
    if tokens <= 1024:
        return RouteCut(64, 128, 4, 64, 3, 4)
    return RouteCut(64, 128, 4, 64, 2, 4) if tokens <= 4096 else RouteCut(64, 128, 2, 32, 3, 4)


class Routed(NamedTuple):
    """ids: [T, k] int32, each token's experts by their weight, largest first. weights: [T, k] float32."""

    ids: torch.Tensor
    weights: torch.Tensor


def route_reference(x: torch.Tensor, norm: SkinnyNorm, router: torch.Tensor, top_k: int, renormalise: bool) -> Routed:
    """What `route` gives, of the router [E, H] itself."""
    wide = F.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps)
    probabilities = F.linear(wide, router.float()).softmax(-1)
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    return Routed(ids.int(), weights / weights.sum(-1, keepdim=True) if renormalise else weights)


@triton.jit
def _columns(pointers, k, H: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=k < H, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def _tile(pointers, k, H: tl.constexpr, MASKED: tl.constexpr, COMPILED: tl.constexpr):
    """For a product: as it is, but in float32 for the interpreter, which has no bfloat16."""
    if MASKED:
        tile = tl.load(pointers, mask=k < H, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile if COMPILED else tile.to(tl.float32)


@triton.jit
def _partial_logits(
    x_ptr, terms_ptr, sums_ptr, tokens, stride_x, first_token, first_expert, split,
    E: tl.constexpr, H: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Of TOKENS tokens and BLOCK_E experts, over the SPAN columns of a split: to sums [splits, tokens, E]."""
    token = first_token + tl.arange(0, TOKENS)
    expert = first_expert + tl.arange(0, BLOCK_E)
    column = tl.arange(0, BLOCK_K)[None, :]
    # Rows past the end are copies of the last one, and not written.
    x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_x + column
    high_rows = terms_ptr + tl.minimum(expert, E - 1)[:, None] * H + column
    low_rows = high_rows + E * H
    sums = tl.zeros([TOKENS, BLOCK_E], tl.float32)
    for step in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        at = split * SPAN + step
        x = _tile(x_rows + at, at + column, H, MASKED, COMPILED)
        sums = tl.dot(x, tl.trans(_tile(high_rows + at, at + column, H, MASKED, COMPILED)), sums)
        sums = tl.dot(x, tl.trans(_tile(low_rows + at, at + column, H, MASKED, COMPILED)), sums)
    out = sums_ptr + (split * tokens + token).to(tl.int64)[:, None] * E + expert[None, :]
    tl.store(out, sums, mask=(token < tokens)[:, None] & (expert < E)[None, :])


@triton.jit
def _norm_rows(
    x_ptr, norm_ptr, scale_ptr, factors_ptr, normed_ptr, scales_ptr, first, end, stride_x, scale_stride, eps,
    H: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Of up to ROWS tokens before `end`: what their sums are multiplied by, and what NORMED asks for."""
    token = first + tl.arange(0, ROWS)
    there = token < end
    # Groups of 128 columns, each with a scale.
    column = tl.arange(0, GROUPS)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    x_rows = x_ptr + tl.minimum(token, end - 1).to(tl.int64)[:, None, None] * stride_x
    x = _columns(x_rows + column, column, H, GROUPS * 128 != H)
    rstd = tl.rsqrt(tl.sum(tl.sum(x * x, 2), 1) / H + eps)
    tl.store(factors_ptr + token, rstd / tl.load(scale_ptr), mask=there)
    if NORMED != "none":
        y = x * rstd[:, None, None] * _columns(norm_ptr + column, column, H, GROUPS * 128 != H)
        if NORMED == "codes":
            scale = scale_of(tl.max(tl.abs(y), 2))
            group = tl.arange(0, GROUPS)[None, :]
            out = scales_ptr + group * scale_stride + token[:, None]
            tl.store(out, scale, mask=there[:, None] & (group * 128 < H))
            y = code_of(y, scale[:, :, None])
        normed = normed_ptr + token.to(tl.int64)[:, None, None] * H + column
        tl.store(normed, y.to(normed_ptr.dtype.element_ty), mask=there[:, None, None] & (column < H))


@triton.jit
def _choose(
    sums_ptr, factors_ptr, ids_ptr, weights_ptr, first, tokens, SPLITS: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Ids and weights of the TOP_K first experts of ROWS tokens."""
    token = first + tl.arange(0, ROWS)
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    expert = tl.arange(0, E_PAD)[None, :]
    logits = read_logits(sums_ptr + row[:, None] * E, expert, E)
    for split in tl.static_range(1, SPLITS):
        logits += read_logits(sums_ptr + (split * tokens + row)[:, None] * E, expert, E)
    logits *= tl.load(factors_ptr + row, cache_modifier=".cg")[:, None]
    keys = sort_keys(logits, expert, E_PAD)
    shares = tl.exp(logits - tl.max(logits, 1)[:, None])
    # Only the largest key is looked for again and again; who holds it writes its id and weight in the end.
    place = tl.full([ROWS, E_PAD], TOP_K, tl.int32)
    for i in tl.static_range(TOP_K):
        largest = keys == tl.max(keys, 1)[:, None]
        place = tl.where(largest, i, place)
        keys = tl.where(largest, -2147483648, keys)
    chosen = place < TOP_K
    weights = shares / tl.sum(tl.where(chosen, shares, 0.0) if RENORMALISE else shares, 1)[:, None]
    pick = token.to(tl.int64)[:, None] * TOP_K + place
    chosen = chosen & (token < tokens)[:, None]
    tl.store(ids_ptr + pick, tl.minimum(expert, E - 1) + tl.zeros_like(place), mask=chosen)
    tl.store(weights_ptr + pick, weights, mask=chosen)


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def _route_kernel(
    x_ptr,
    norm_ptr,
    terms_ptr,
    scale_ptr,
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
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """The first programs are products, each of TOKENS tokens and some experts over some columns; the others norm ROWS
    rows each. Whoever is the last of its TOKENS tokens chooses, CHOSEN of them at a time.

    NORMED: what else is written, "none", "plain" (norm(x)) or "codes" (that rounded, in groups of 128 columns).
    """
    TILES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
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
        SIZE: tl.constexpr = terms_ptr.dtype.element_ty.primitive_bitwidth // 8
        if SPAN * SIZE % 16 == 0 and H % SPAN == 0:
            rows = tl.where(number < PRODUCTS, tl.minimum(E - first_expert, BLOCK_E), 0)
            part = terms_ptr + first_expert * H + split * SPAN
            prefetch_rows(part, rows, H * SIZE, SPAN * SIZE)
            prefetch_rows(part + E * H, rows, H * SIZE, SPAN * SIZE)
        tl.extra.cuda.gdc_wait()
    if multiplies:
        _partial_logits(
            x_ptr, terms_ptr, sums_ptr, tokens, stride_x, first, first_expert, split,
            E, H, SPAN, TOKENS, BLOCK_E, BLOCK_K, STAGES, H != SPAN * SPLITS, COMPILED,
        )  # fmt: skip
    else:
        row = first + (number - products) % NORMS * ROWS
        end = tl.minimum(first + TOKENS, tokens)
        if row < end:
            _norm_rows(
                x_ptr, norm_ptr, scale_ptr, factors_ptr, normed_ptr, scales_ptr, row, end, stride_x, scale_stride, eps,
                H, ROWS, GROUPS, NORMED,
            )  # fmt: skip

    tl.debug_barrier()  # all threads have written before one of them says so
    arrived = arrived_ptr + together
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == PRODUCTS + NORMS - 1:
        tl.store(arrived, 0)
        for start in tl.range(first, tl.minimum(first + TOKENS, tokens), CHOSEN):
            _choose(
                sums_ptr, factors_ptr, ids_ptr, weights_ptr, start, tokens,
                SPLITS, E, E_PAD, CHOSEN, TOP_K, RENORMALISE,
            )  # fmt: skip


@triton.jit
def _logits_kernel(
    x_ptr,
    norm_ptr,
    router_ptr,
    logits_ptr,
    rstd_ptr,
    stride_x,
    eps,
    E: tl.constexpr,
    H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (t, i): token t's logits of BLOCK_E experts, and 1 / its root mean square."""
    CHUNKS: tl.constexpr = (H + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = H % BLOCK_K != 0
    token = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = router_ptr + tl.minimum(expert, E - 1)[:, None] * H
    k = tl.arange(0, BLOCK_K)[None, :]
    kept = ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * BLOCK_K + k
        kept += (_columns(rows + at, at, H, MASKED) * _columns(norm_ptr + at, at, H, MASKED),)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Behind the wait: a kernel that starts now finds all that is older than this one done.
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    squares = tl.zeros([1, BLOCK_K], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = chunk * BLOCK_K + k
        x = _columns(x_ptr + token * stride_x + at, at, H, MASKED)
        squares += x * x
        sums += x * kept[chunk]
    rstd = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / H + eps)
    tl.store(logits_ptr + token * E + expert, tl.sum(sums, 1) * rstd, mask=expert < E)
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
    cut: RouteCut | None = None,
) -> Routed:
    """softmax(norm(x) @ router.T), of each token the largest `top_k`; `renormalise`: divided by their sum.

    x: [T, H], its rows may lie apart. norm: an RMSNorm. terms: of it and the router, in x's dtype. arrived: int32, at
    least T / 16 rounded up, all zero before and after; launches of one stream may have it in common. normed: [T, H],
    contiguous, becomes norm(x), or that rounded, H a multiple of 128, with a scale for each 128 columns. Starts early
    (see `early_start`). A row's results depend on the others only by their number, which says how sums are split.
    """
    (tokens, hidden), experts = x.shape, terms.values.shape[1]
    assert norm.bias is None and x.stride(1) == 1 and x.dtype == terms.values.dtype and top_k <= experts
    assert terms.values.is_contiguous() and arrived.numel() >= cdiv(tokens, TOKENS)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    wanted, scales = (normed.codes, normed.scales) if isinstance(normed, Fp8Rows) else (normed, None)
    assert scales is None or scales.shape[1] * SCALE_BLOCK == hidden
    if not tokens:
        return Routed(ids, weights)
    cut = cut or _cut_of(tokens)
    splits = min(cut.splits, cdiv(hidden, cut.columns))
    span = cdiv(cdiv(hidden, splits), cut.columns) * cut.columns
    groups, padded = next_power_of_2(cdiv(hidden, 128)), next_power_of_2(experts)
    rows = max(1, min(4 if tokens > 128 else 2, _ROW_ELEMENTS // (groups * 128)))
    block_e = min(cut.experts, max(16, padded))
    sums = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    factors = torch.empty(tokens, dtype=torch.float32, device=x.device)
    programs = cdiv(experts, block_e) * splits + cut.tokens // rows
    _route_kernel[(cdiv(tokens, cut.tokens) * programs,)](
        x,
        norm.weight,
        terms.values,
        terms.scale,
        sums,
        factors,
        arrived,
        ids,
        weights,
        wanted,
        scales,
        tokens,
        x.stride(0),
        0 if scales is None else scales.stride(1),
        norm.eps,
        E=experts,
        E_PAD=padded,
        TOP_K=top_k,
        H=hidden,
        TOKENS=cut.tokens,
        BLOCK_E=block_e,
        SPLITS=splits,
        SPAN=span,
        BLOCK_K=cut.columns,
        STAGES=cut.stages,
        ROWS=rows,
        GROUPS=groups,
        CHOSEN=min(cut.tokens, cut.warps * max(1, min(4, 1024 // padded))),
        RENORMALISE=renormalise,
        NORMED="none" if wanted is None else "plain" if scales is None else "codes",
        COMPILED=x.is_cuda,
        num_warps=cut.warps,
        maxnreg=None if cut.warps == 4 else 128,  # so that there is room for norms beside a product
        **early_start.options(x.device),
    )
    return Routed(ids, weights)


def router_logits(x: torch.Tensor, norm: SkinnyNorm, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) @ router.T [T, E] and 1 / the root mean square of each row of x [T], both float32, of few tokens.

    x: [T, H], its rows may lie apart. norm: an RMSNorm. router: [E, H], contiguous. A row's results
    do not depend on the other rows.
    """
    (tokens, hidden), experts = x.shape, router.shape[0]
    assert norm.bias is None and x.stride(1) == 1 and router.is_contiguous()
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block_e = 2 if tokens <= 2 else 4
    _logits_kernel[(tokens, cdiv(experts, block_e))](
        x,
        norm.weight,
        router,
        logits,
        rstd,
        x.stride(0),
        norm.eps,
        E=experts,
        H=hidden,
        BLOCK_E=block_e,
        BLOCK_K=min(2048, next_power_of_2(hidden)),
        num_warps=4,
        **early_start.options(x.device),
    )
    return logits, rstd
