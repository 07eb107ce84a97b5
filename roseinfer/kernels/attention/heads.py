"""Preparation of queries, keys and values for attention, in one launch.

Every head of every token is read once. Queries and keys are normalised (Qwen3) and rotated by their position (rotary
embedding, see `roseinfer.attention.heads`). Queries are written back in place, keys and values to the paged cache. All
arithmetic is float32 and rounded once.
"""

import torch
import torch.nn.functional as F

from roseinfer.kernels.attention.kv_fp8 import narrowed
from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import CODES, MAX_CODE
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton

# Elements of the heads of one program: 16 bytes of a 16-bit type for each of 128 threads.
MAX_PROGRAM_ELEMENTS = 1024
# Up to so many rows, the next attention kernel starts while this one runs, which saves a microsecond or two a layer.
# With more rows its programs would take the room of unfinished ones (256 rows: a fifth longer).
FEW_TOKENS = 16


@triton.jit
def _turn(
    low, high, norm_low, norm_high, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr
):
    """Return both halves [G, D / 2] float32 of some heads of one token, normalised and rotated as asked."""
    if NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / HEAD_DIM + eps)[:, None]
        low *= scale * norm_low
        high *= scale * norm_high
    if ROTATE:
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    return low, high


@triton.jit
def _halves(at, half, inside, HALF: tl.constexpr):
    """Load the two halves [1, D / 2] of a vector, float32."""
    low = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    return low, tl.load(at + HALF + half, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=("slots_ptr", "positions_ptr"))
def _heads_kernel(
    qkv_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_scales_ptr,
    v_scales_ptr,
    qkv_stride,
    block_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    KV_GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Process, in program (t, i), group i of token t's query heads, then of its keys, then of its values."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    half = tl.arange(0, HALF_BLOCK)
    inside = half < HALF
    member = tl.arange(0, GROUP)[:, None]
    qkv_ptr += token * qkv_stride
    # Weights never change, and the step's inputs are older than its embedding, which no kernel overtakes.
    norm_low, norm_high, cos, sin = 1.0, 1.0, 1.0, 0.0
    if ROTATE:
        cos, sin = _halves(cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM, half, inside, HALF)
    if NORM:
        norm_low, norm_high = _halves(q_weight_ptr if group < Q_GROUPS else k_weight_ptr, half, inside, HALF)
    slot = tl.load(slots_ptr + token)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if group < Q_GROUPS:
        head = group * GROUP + member
        mask = (head < HEADS) & inside[None, :]
        at = qkv_ptr + head * HEAD_DIM + half[None, :]
        low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = _turn(low, high, norm_low, norm_high, cos, sin, eps, HEAD_DIM, NORM, ROTATE)
        tl.store(at, low.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(at + HALF, high.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        is_value = group >= Q_GROUPS + KV_GROUPS
        head = (group - Q_GROUPS) % KV_GROUPS * GROUP + member
        mask = (head < KV_HEADS) & inside[None, :] & (slot >= 0)
        at = qkv_ptr + (HEADS + tl.where(is_value, KV_HEADS, 0) + head) * HEAD_DIM + half[None, :]
        low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        to += head * HEAD_DIM + half[None, :]
        if is_value:
            _keep(low, high, v_cache_ptr + to, v_scales_ptr, head, head < KV_HEADS, mask, HALF, FP8)
        else:
            low, high = _turn(low, high, norm_low, norm_high, cos, sin, eps, HEAD_DIM, NORM, ROTATE)
            _keep(low, high, k_cache_ptr + to, k_scales_ptr, head, head < KV_HEADS, mask, HALF, FP8)


@triton.jit
def _keep(low, high, at, scales, head, is_head, mask, HALF: tl.constexpr, FP8: tl.constexpr):
    """Store both halves of some heads' keys or values in the cache."""
    if FP8:
        scale = tl.load(scales + head, mask=is_head, other=1.0)
        tl.store(at, narrowed(low, scale), mask=mask)
        tl.store(at + HALF, narrowed(high, scale), mask=mask)
    else:
        tl.store(at, low.to(at.dtype.element_ty), mask=mask)
        tl.store(at + HALF, high.to(at.dtype.element_ty), mask=mask)


def store_heads(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    group: int | None = None,
    num_warps: int = 4,
) -> None:
    """Normalise and rotate queries in place and keys on their way into the cache; copy values into the cache.

    qkv: [T, (heads + 2 * kv_heads) * head_dim]: queries, keys, values; its rows may be apart. Its keys and values are
    not changed. k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim], `KVStore.layer`, of qkv's dtype or of
    codes (e4m3fn), which readers multiply by kv_scales ([kv_heads] float32 each). slots: [T] int64, -1 for keys and
    values that are not written. positions: [T] int64, rows of cos_sin. cos_sin: [max_len, head_dim] float32, see
    `cos_sin_table`; None for no rotation. q_weight, k_weight: [head_dim], RMSNorm of each head; None (both) for none.
    """
    tokens = qkv.shape[0]
    assert (k_cache.dtype == CODES) == (kv_scales is not None)
    k_scales, v_scales = kv_scales or (None, None)
    assert qkv.stride(1) == 1 and k_cache.stride() == v_cache.stride() and (q_weight is None) == (k_weight is None)
    half_block = next_power_of_2(head_dim // 2)
    group = group or max(1, MAX_PROGRAM_ELEMENTS // (2 * half_block))
    q_groups = 0 if cos_sin is None and q_weight is None else cdiv(heads, group)
    kv_groups = cdiv(kv_heads, group)
    if tokens:
        _heads_kernel[(tokens, q_groups + 2 * kv_groups)](
            qkv,
            k_cache,
            v_cache,
            slots,
            positions,
            cos_sin,
            q_weight,
            k_weight,
            k_scales,
            v_scales,
            qkv.stride(0),
            k_cache.stride(0),
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=k_cache.shape[1],
            GROUP=group,
            HALF_BLOCK=half_block,
            Q_GROUPS=q_groups,
            KV_GROUPS=kv_groups,
            NORM=q_weight is not None,
            ROTATE=cos_sin is not None,
            FP8=kv_scales is not None,
            EARLY=tokens <= FEW_TOKENS and early_start.capable(qkv.device),
            num_warps=num_warps,
            **early_start.options(qkv.device),
        )


def cos_sin_table(frequencies: torch.Tensor, max_len: int) -> torch.Tensor:
    """Return [max_len, D] float32: the cosines of position * frequencies [D / 2], then the sines."""
    positions = torch.arange(max_len, device=frequencies.device).to(torch.float32)
    angles = positions[:, None] * frequencies.to(torch.float32)
    return torch.cat((angles.cos(), angles.sin()), -1)


def store_heads_reference(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    query, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, -1))
    q, k = query.float(), k.float()
    if q_weight is not None and k_weight is not None:
        q = F.rms_norm(q, (head_dim,), q_weight.float(), eps)
        k = F.rms_norm(k, (head_dim,), k_weight.float(), eps)
    if cos_sin is not None:
        cos, sin = cos_sin[positions][:, None].chunk(2, -1)
        q, k = _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)
    query.copy_(q)
    if kv_scales is not None:
        k = (k / kv_scales[0][:, None]).clamp(-MAX_CODE, MAX_CODE)
        v = (v / kv_scales[1][:, None]).clamp(-MAX_CODE, MAX_CODE)
    kept = (slots >= 0).nonzero().squeeze(1)
    block, offset = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    k_cache[block, offset] = k[kept].to(k_cache.dtype)
    v_cache[block, offset] = v[kept].to(v_cache.dtype)


def _rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
