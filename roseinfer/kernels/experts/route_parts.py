"""Parts of the router's programs, for the kernels of `route` and `route_many`."""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.logit_order import read_logits, sort_keys
from roseinfer.kernels.linear.fp8_rows import code_of, scale_of
from roseinfer.kernels.linear.skinny_kernel import prefetch_rows
from roseinfer.kernels.linear.small_product import columns_of


@triton.jit
def _tile(pointers, k, H: tl.constexpr, MASKED: tl.constexpr, COMPILED: tl.constexpr):
    """Load a factor of a product: as it is, or in float32 for the interpreter, which has no bfloat16."""
    if MASKED:
        tile = tl.load(pointers, mask=k < H, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile if COMPILED else tile.to(tl.float32)


@triton.jit
def prefetch_terms(
    terms_ptr, wanted, first_expert, split,
    E: tl.constexpr, H: tl.constexpr, BLOCK_E: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Request the factors of `partial_logits` into the L2 cache, where that is `wanted`."""
    SIZE: tl.constexpr = terms_ptr.dtype.element_ty.primitive_bitwidth // 8
    if SPAN * SIZE % 16 == 0 and H % SPAN == 0:
        rows = tl.where(wanted, tl.minimum(E - first_expert, BLOCK_E), 0)
        part = terms_ptr + first_expert * H + split * SPAN
        prefetch_rows(part, rows, H * SIZE, SPAN * SIZE)
        prefetch_rows(part + E * H, rows, H * SIZE, SPAN * SIZE)


@triton.jit
def partial_logits(
    x_ptr, terms_ptr, sums_ptr, tokens, stride_x, first_token, first_expert, split,
    E: tl.constexpr, H: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Write the sums [splits, tokens, E] of TOKENS tokens and BLOCK_E experts, over the SPAN columns of a split."""
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
def norm_rows(
    x_ptr, norm_ptr, normed_ptr, scales_ptr, first, end, stride_x, scale_stride, eps,
    H: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Return 1 / the root mean square of ROWS tokens, and write norms of those before `end` as NORMED asks.

    NORMED: "none", "plain" (norm(x)) or "codes" (norm(x) rounded, in groups of 128 columns).
    """
    token = first + tl.arange(0, ROWS)
    there = token < end
    # Groups of 128 columns, each with a scale.
    column = tl.arange(0, GROUPS)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    x_rows = x_ptr + tl.minimum(token, end - 1).to(tl.int64)[:, None, None] * stride_x
    x = columns_of(x_rows + column, column, H, GROUPS * 128 != H)
    rstd = tl.rsqrt(tl.sum(tl.sum(x * x, 2), 1) / H + eps)
    if NORMED != "none":
        y = x * rstd[:, None, None] * columns_of(norm_ptr + column, column, H, GROUPS * 128 != H)
        if NORMED == "codes":
            scale = scale_of(tl.max(tl.abs(y), 2))
            group = tl.arange(0, GROUPS)[None, :]
            out = scales_ptr + group * scale_stride + token[:, None]
            tl.store(out, scale, mask=there[:, None] & (group * 128 < H))
            y = code_of(y, scale[:, :, None])
        normed = normed_ptr + token.to(tl.int64)[:, None, None] * H + column
        tl.store(normed, y.to(normed_ptr.dtype.element_ty), mask=there[:, None, None] & (column < H))
    return rstd


@triton.jit
def choose(
    sums_ptr, factors, bias_ptr, ids_ptr, weights_ptr, first, tokens, SPLITS: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write ids and weights of the TOP_K first experts of ROWS tokens, and with SHARED of expert E after them.
    factors [ROWS]: multiply their sums.
    """
    ROUTER_ROWS: tl.constexpr = E + SHARED
    PLACES: tl.constexpr = TOP_K + SHARED
    token = first + tl.arange(0, ROWS)
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    expert = tl.arange(0, E_PAD)[None, :]
    logits = read_logits(sums_ptr + row[:, None] * ROUTER_ROWS, expert, E)
    for split in tl.static_range(1, SPLITS):
        logits += read_logits(sums_ptr + (split * tokens + row)[:, None] * ROUTER_ROWS, expert, E)
    logits *= factors[:, None]
    if HAS_BIAS:
        logits += tl.load(bias_ptr + expert, mask=expert < E, other=0.0)
    keys = sort_keys(logits, expert, E_PAD)
    shares = tl.exp(logits - tl.max(logits, 1)[:, None])
    # Only the largest key is searched repeatedly; its holder writes its id and weight at the end.
    place = tl.full([ROWS, E_PAD], TOP_K, tl.int32)
    for i in tl.static_range(TOP_K):
        largest = keys == tl.max(keys, 1)[:, None]
        place = tl.where(largest, i, place)
        keys = tl.where(largest, -2147483648, keys)
    chosen = place < TOP_K
    weights = shares / tl.sum(tl.where(chosen, shares, 0.0) if RENORMALISE else shares, 1)[:, None]
    pick = token.to(tl.int64)[:, None] * PLACES + place
    chosen = chosen & (token < tokens)[:, None]
    tl.store(ids_ptr + pick, tl.minimum(expert, E - 1) + tl.zeros_like(place), mask=chosen)
    tl.store(weights_ptr + pick, weights, mask=chosen)
    if SHARED:
        logit = tl.zeros([ROWS], tl.float32)
        for split in tl.static_range(SPLITS):
            logit += tl.load(sums_ptr + (split * tokens + row) * ROUTER_ROWS + E, cache_modifier=".cg")
        last = token.to(tl.int64) * PLACES + TOP_K
        tl.store(ids_ptr + last, tl.full([ROWS], E, tl.int32), mask=token < tokens)
        tl.store(weights_ptr + last, tl.sigmoid(logit * factors), mask=token < tokens)
