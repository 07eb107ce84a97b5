"""Which experts a token goes to, with the norm before the router, in one launch: `route`; their logits alone, for
`experts_few`, which puts them in order itself: `router_logits`.

Choosing is no product: a rounded logit may change the expert, and all that follows. So the normed input is not rounded
to 16 bits for it, and sums, softmax and weights are float32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from roseinfer.kernels import early_start
from roseinfer.kernels.expert_order import expert_of, read_logits, sort_keys
from roseinfer.kernels.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.fp8_rows import Fp8Rows, code_of, scale_of
from roseinfer.kernels.skinny_kernel import prefetch_rows
from roseinfer.kernels.skinny_linear import SkinnyNorm
from roseinfer.kernels.triton_support import cdiv, next_power_of_2, tl, triton

# Tokens of a program at least: `arrived` counts for each so many.
TOKENS = 16


class _Cut(NamedTuple):
    """A program takes so many tokens and experts; a product so many columns, `slices` of them at a time."""

    tokens: int
    experts: int
    columns: int
    slices: int
    warps: int


def _cut_of(tokens: int) -> _Cut:
    """By reasoning, not measured yet: as many programs as there are multiprocessors."""
    if tokens <= 512:
        return _Cut(16, 16, 64, 4, 4)
    return _Cut(16, 32, 32, 4, 4) if tokens <= 1024 else _Cut(32, 64, 16, 8, 8)


class Routed(NamedTuple):
    """ids: [T, k] int32, each token's experts by their weight, largest first. weights: [T, k] float32."""

    ids: torch.Tensor
    weights: torch.Tensor


def route_reference(x: torch.Tensor, norm: SkinnyNorm, router: torch.Tensor, top_k: int, renormalise: bool) -> Routed:
    """What `route` gives."""
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
def _choose(pointer, E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Ids and weights [tokens, K_PAD] of the TOP_K first of the logits at `pointer` [tokens, 1]."""
    expert, place = tl.arange(0, E_PAD)[None, :], tl.arange(0, K_PAD)[None, :]
    logits = read_logits(pointer, expert, E)
    keys = sort_keys(logits, expert, E_PAD)
    shares = tl.exp(logits - tl.max(logits, 1)[:, None])
    ids = tl.zeros([logits.shape[0], K_PAD], tl.int32)
    weights = tl.zeros([logits.shape[0], K_PAD], tl.float32)
    for i in tl.static_range(TOP_K):
        first = tl.max(keys, 1)[:, None]
        share = tl.sum(tl.where(keys == first, shares, 0.0), 1)[:, None]
        ids = tl.where(place == i, expert_of(first, E, E_PAD), ids)
        weights = tl.where(place == i, share, weights)
        keys = tl.where(keys == first, -2147483648, keys)
    return ids, weights / tl.sum(weights if RENORMALISE else shares, 1)[:, None]


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def _route_kernel(
    x_ptr,
    norm_ptr,
    router_ptr,
    logits_ptr,
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
    K_PAD: tl.constexpr,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (t, i): the logits of TOKENS tokens and BLOCK_E experts. Whoever is the last of its tokens chooses.

    NORMED: what else is written, "none", "plain" (norm(x)) or "codes" (that rounded, in groups of 128 columns).
    """
    MASKED: tl.constexpr = H % (SLICES * BLOCK_K) != 0
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        first = tl.program_id(1) * BLOCK_E
        SIZE: tl.constexpr = router_ptr.dtype.element_ty.primitive_bitwidth // 8
        if H * SIZE % 16 == 0:
            prefetch_rows(router_ptr + first.to(tl.int64) * H, tl.minimum(E - first, BLOCK_E), H * SIZE, H * SIZE)
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    # A product for each of SLICES of columns: with small tiles one for each warp.
    column = tl.arange(0, BLOCK_K)[None, :] + (tl.arange(0, SLICES) * BLOCK_K)[:, None]
    # Rows past the end are copies of the last one, and not written.
    x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_x
    router_rows = router_ptr + tl.minimum(expert, E - 1).to(tl.int64)[None, :, None] * H
    sums = tl.zeros([SLICES, TOKENS, BLOCK_E], tl.float32)
    squares = tl.zeros([SLICES, TOKENS], tl.float32)
    for start in tl.range(0, H, SLICES * BLOCK_K, num_stages=3):
        k = start + column[:, None, :]
        x = _columns(x_rows[None, :, :] + k, k, H, MASKED)
        squares += tl.sum(x * x, 2)
        x *= _columns(norm_ptr + k, k, H, MASKED)
        w = _columns(router_rows + k, k, H, MASKED)
        sums = tl.dot(x, tl.permute(w, (0, 2, 1)), sums, input_precision="tf32x3")
    squares, sums = tl.sum(squares, 0), tl.sum(sums, 0)
    rstd = tl.rsqrt(squares / H + eps)[:, None]
    there = (token < tokens)[:, None]
    out = logits_ptr + token.to(tl.int64)[:, None] * E + expert[None, :]
    tl.store(out, sums * rstd, mask=there & (expert < E)[None, :])
    if NORMED != "none":
        # Every program writes some of the columns.
        for start in tl.range(tl.program_id(1) * 128, H, tl.num_programs(1) * 128):
            at = start + tl.arange(0, 128)[None, :]
            y = _columns(x_rows + at, at, H, H % 128 != 0) * rstd * _columns(norm_ptr + at, at, H, H % 128 != 0)
            if NORMED == "codes":
                scale = scale_of(tl.max(tl.abs(y), 1))
                tl.store(scales_ptr + start // 128 * scale_stride + token, scale, mask=token < tokens)
                y = code_of(y, scale[:, None])
            normed = normed_ptr + token.to(tl.int64)[:, None] * H + at
            tl.store(normed, y.to(normed_ptr.dtype.element_ty), mask=there & (at < H))

    tl.debug_barrier()  # all threads have written before one of them says so
    arrived = arrived_ptr + tl.program_id(0)
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        tl.store(arrived, 0)
        row = tl.minimum(token, tokens - 1).to(tl.int64)[:, None]
        ids, weights = _choose(logits_ptr + row * E, E, E_PAD, TOP_K, K_PAD, RENORMALISE)
        place = tl.arange(0, K_PAD)[None, :]
        pick = token.to(tl.int64)[:, None] * TOP_K + place
        tl.store(ids_ptr + pick, ids, mask=there & (place < TOP_K))
        tl.store(weights_ptr + pick, weights, mask=there & (place < TOP_K))


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
    router: torch.Tensor,
    top_k: int,
    renormalise: bool,
    arrived: torch.Tensor,
    normed: torch.Tensor | Fp8Rows | None = None,
) -> Routed:
    """softmax(norm(x) @ router.T), of each token the largest `top_k`; `renormalise`: divided by their sum.

    x: [T, H], its rows may lie apart. norm: an RMSNorm. router: [E, H], contiguous. arrived: int32, at least T / 16
    rounded up, all zero before and after; launches of one stream may have it in common. normed: [T, H], contiguous,
    becomes norm(x), or that rounded, H a multiple of 128, with a scale for each 128 columns. Starts early (see
    `early_start`).
    """
    (tokens, hidden), experts = x.shape, router.shape[0]
    cut = _cut_of(tokens)
    assert norm.bias is None and x.stride(1) == 1 and router.is_contiguous() and top_k <= experts
    assert arrived.numel() >= cdiv(tokens, TOKENS)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    wanted, scales = (normed.codes, normed.scales) if isinstance(normed, Fp8Rows) else (normed, None)
    assert scales is None or scales.shape[1] * SCALE_BLOCK == hidden
    if tokens:
        _route_kernel[(cdiv(tokens, cut.tokens), cdiv(experts, cut.experts))](
            x,
            norm.weight,
            router,
            logits,
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
            E_PAD=next_power_of_2(experts),
            TOP_K=top_k,
            K_PAD=next_power_of_2(top_k),
            H=hidden,
            TOKENS=cut.tokens,
            BLOCK_E=cut.experts,
            BLOCK_K=cut.columns,
            SLICES=cut.slices,
            RENORMALISE=renormalise,
            NORMED="none" if wanted is None else "plain" if scales is None else "codes",
            num_warps=cut.warps,
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
