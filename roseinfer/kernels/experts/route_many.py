"""Router of many tokens in two launches: products, then norms of rows with the choice of their experts.

In one launch (`route`) a norming program holds as many registers and as much shared memory as a multiplying one, so few
run at once. And the last program chooses for all tokens of a product, while other programs have nothing left to do.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.route_parts import choose, norm_rows, partial_logits, prefetch_terms


@triton.jit(do_not_specialize=["tokens"])
def route_products_kernel(
    x_ptr,
    terms_ptr,
    sums_ptr,
    tokens,
    stride_x,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Write sums [SPLITS, tokens, E + SHARED]. A program takes TOKENS tokens, BLOCK_E experts and SPAN columns."""
    ROUTER_ROWS: tl.constexpr = E + SHARED
    TILES: tl.constexpr = (ROUTER_ROWS + BLOCK_E - 1) // BLOCK_E
    PRODUCTS: tl.constexpr = TILES * SPLITS
    number = tl.program_id(0)
    first_expert, split = number % TILES * BLOCK_E, number // TILES % SPLITS
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch_terms(terms_ptr, number < PRODUCTS, first_expert, split, ROUTER_ROWS, H, BLOCK_E, SPAN)
        tl.extra.cuda.gdc_wait()
    partial_logits(
        x_ptr, terms_ptr, sums_ptr, tokens, stride_x, number // PRODUCTS * TOKENS, first_expert, split,
        ROUTER_ROWS, H, SPAN, TOKENS, BLOCK_E, BLOCK_K, STAGES, H != SPAN * SPLITS, COMPILED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def route_choice_kernel(
    x_ptr,
    norm_ptr,
    scale_ptr,
    bias_ptr,
    sums_ptr,
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
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm ROWS tokens in each program, and choose their experts by their sums."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * ROWS
    rstd = norm_rows(
        x_ptr, norm_ptr, normed_ptr, scales_ptr, first, tokens, stride_x, scale_stride, eps, H, ROWS, GROUPS, NORMED
    )
    factors = rstd / tl.load(scale_ptr)
    choose(
        sums_ptr, factors, bias_ptr, ids_ptr, weights_ptr, first, tokens, SPLITS, E, E_PAD, SHARED, ROWS, TOP_K,
        RENORMALISE, HAS_BIAS,
    )  # fmt: skip
