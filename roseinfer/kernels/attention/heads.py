"""Preparation of queries, keys and values for attention, in one launch.

Every head of every token is read once. Queries and keys are normalised (Qwen3) and rotated by their position (rotary
embedding, see `roseinfer.attention.rope`). Queries are written back in place, keys and values to the paged cache. All
arithmetic is float32 and rounded once.
"""

from dataclasses import dataclass

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
# When heads are normalised.
NORM_BEFORE: tl.constexpr = tl.constexpr(1)
NORM_AFTER: tl.constexpr = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class RotatedPairs:
    """Numbers of a head that are rotated together: the first `count` of a head. interleaved: 2i with 2i + 1, otherwise
    i with i + count / 2.
    """

    count: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadPreparation:
    """Norm and rotation of queries and keys.

    queries_cos_sin, keys_cos_sin: [max_len, head_dim] float32, see `cos_sin_table`; None (both) for no rotation. pairs:
    None = all numbers of a head, i with i + head_dim / 2. q_weight, k_weight: [head_dim], RMSNorm of each head; None
    (both) for none. norm_after: heads are normalised after their rotation.
    """

    queries_cos_sin: torch.Tensor | None = None
    keys_cos_sin: torch.Tensor | None = None
    pairs: RotatedPairs | None = None
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
    norm_after: bool = False

    @property
    def is_none(self) -> bool:
        return self.keys_cos_sin is None and self.q_weight is None

    def options(self, head_dim: int) -> dict[str, int | bool]:
        """Return the kernels' options."""
        pairs = self.pairs or RotatedPairs(head_dim)
        return {
            "NORM": 0 if self.q_weight is None else NORM_AFTER.value if self.norm_after else NORM_BEFORE.value,
            "ROTATE": self.keys_cos_sin is not None,
            "ROTATED": pairs.count,
            "INTERLEAVED": pairs.interleaved,
        }


@triton.jit
def norm_scale(squares, HEAD_DIM: tl.constexpr, eps):
    """Return the factor of each head's RMSNorm, from the sums of its squares [G]."""
    return tl.rsqrt(squares / HEAD_DIM + eps)[:, None]


@triton.jit
def _turn(
    low, high, norm_low, norm_high, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr
):
    """Return both parts [G, D / 2] float32 of some heads of one token, normalised and rotated as asked."""
    if NORM == NORM_BEFORE:
        scale = norm_scale(tl.sum(low * low + high * high, 1), HEAD_DIM, eps)
        low *= scale * norm_low
        high *= scale * norm_high
    if ROTATE:
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if NORM == NORM_AFTER:
        scale = norm_scale(tl.sum(low * low + high * high, 1), HEAD_DIM, eps)
        low *= scale * norm_low
        high *= scale * norm_high
    return low, high


@triton.jit
def _places(half, HALF: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return where both numbers of pair `half` are in a head. Numbers that are not rotated are in pairs, too."""
    low = half
    high = half + HALF
    if INTERLEAVED:
        low = tl.where(half < ROTATED // 2, 2 * half, half + ROTATED // 2)
        high = tl.where(half < ROTATED // 2, 2 * half + 1, half + HALF)
    elif ROTATED < 2 * HALF:
        low = tl.where(half < ROTATED // 2, half, half + ROTATED // 2)
        high = tl.where(half < ROTATED // 2, half + ROTATED // 2, half + HALF)
    return low, high


@triton.jit
def _two(at, low, high, inside):
    """Load two parts [1, D / 2] of a vector, float32."""
    first = tl.load(at + low, mask=inside, other=0.0).to(tl.float32)[None, :]
    return first, tl.load(at + high, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=("slots_ptr", "positions_ptr"))
def _heads_kernel(
    qkv_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    positions_ptr,
    queries_cos_sin_ptr,
    keys_cos_sin_ptr,
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
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
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
    first, second = _places(half, HALF, ROTATED, INTERLEAVED)
    member = tl.arange(0, GROUP)[:, None]
    qkv_ptr += token * qkv_stride
    # Weights never change, and the step's inputs are older than its embedding, which no kernel overtakes.
    norm_low, norm_high, cos, sin = 1.0, 1.0, 1.0, 0.0
    if ROTATE:
        table = queries_cos_sin_ptr if group < Q_GROUPS else keys_cos_sin_ptr
        cos, sin = _two(table + tl.load(positions_ptr + token) * HEAD_DIM, half, half + HALF, inside)
    if NORM:
        norm_low, norm_high = _two(q_weight_ptr if group < Q_GROUPS else k_weight_ptr, first, second, inside)
    if KV_GROUPS > 0:
        slot = tl.load(slots_ptr + token)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if group < Q_GROUPS:
        head = group * GROUP + member
        mask = (head < HEADS) & inside[None, :]
        at = qkv_ptr + head * HEAD_DIM
        low = tl.load(at + first[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(at + second[None, :], mask=mask, other=0.0).to(tl.float32)
        low, high = _turn(low, high, norm_low, norm_high, cos, sin, eps, HEAD_DIM, NORM, ROTATE)
        tl.store(at + first[None, :], low.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(at + second[None, :], high.to(qkv_ptr.dtype.element_ty), mask=mask)
    elif KV_GROUPS > 0:
        is_value = group >= Q_GROUPS + KV_GROUPS
        head = (group - Q_GROUPS) % KV_GROUPS * GROUP + member
        mask = (head < KV_HEADS) & inside[None, :] & (slot >= 0)
        at = qkv_ptr + (HEADS + tl.where(is_value, KV_HEADS, 0) + head) * HEAD_DIM
        low = tl.load(at + first[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(at + second[None, :], mask=mask, other=0.0).to(tl.float32)
        to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        to += head * HEAD_DIM
        to_low, to_high = to + first[None, :], to + second[None, :]
        if is_value:
            _keep(low, high, v_cache_ptr, to_low, to_high, v_scales_ptr, head, head < KV_HEADS, mask, FP8)
        else:
            low, high = _turn(low, high, norm_low, norm_high, cos, sin, eps, HEAD_DIM, NORM, ROTATE)
            _keep(low, high, k_cache_ptr, to_low, to_high, k_scales_ptr, head, head < KV_HEADS, mask, FP8)


@triton.jit
def _keep(low, high, cache, to_low, to_high, scales, head, is_head, mask, FP8: tl.constexpr):
    """Store both parts of some heads' keys or values in the cache."""
    if FP8:
        scale = tl.load(scales + head, mask=is_head, other=1.0)
        tl.store(cache + to_low, narrowed(low, scale), mask=mask)
        tl.store(cache + to_high, narrowed(high, scale), mask=mask)
    else:
        tl.store(cache + to_low, low.to(cache.dtype.element_ty), mask=mask)
        tl.store(cache + to_high, high.to(cache.dtype.element_ty), mask=mask)


def store_heads(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    preparation: HeadPreparation,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    group: int | None = None,
    num_warps: int = 4,
) -> None:
    """Normalise and rotate queries in place and keys on their way into the cache; copy values into the cache.

    qkv: [T, (heads + 2 * kv_heads) * head_dim]: queries, keys, values; its rows may be apart. Its keys and values are
    not changed. k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim], `KVStore.layer`, of qkv's dtype or of
    codes (e4m3fn), which readers multiply by kv_scales ([kv_heads] float32 each). slots: [T] int64, -1 for keys and
    values that are not written. positions: [T] int64, rows of the tables of angles.
    """
    tokens = qkv.shape[0]
    assert (k_cache.dtype == CODES) == (kv_scales is not None)
    k_scales, v_scales = kv_scales or (None, None)
    assert qkv.stride(1) == 1 and k_cache.stride() == v_cache.stride()
    half_block = next_power_of_2(head_dim // 2)
    group = group or max(1, MAX_PROGRAM_ELEMENTS // (2 * half_block))
    q_groups = 0 if preparation.is_none else cdiv(heads, group)
    kv_groups = cdiv(kv_heads, group)
    if tokens:
        _heads_kernel[(tokens, q_groups + 2 * kv_groups)](
            qkv,
            k_cache,
            v_cache,
            slots,
            positions,
            preparation.queries_cos_sin,
            preparation.keys_cos_sin,
            preparation.q_weight,
            preparation.k_weight,
            k_scales,
            v_scales,
            qkv.stride(0),
            k_cache.stride(0),
            preparation.eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=k_cache.shape[1],
            GROUP=group,
            HALF_BLOCK=half_block,
            Q_GROUPS=q_groups,
            KV_GROUPS=kv_groups,
            **preparation.options(head_dim),
            FP8=kv_scales is not None,
            EARLY=tokens <= FEW_TOKENS and early_start.capable(qkv.device),
            num_warps=num_warps,
            **early_start.options(qkv.device),
        )


def turn_heads(
    qkv: torch.Tensor,
    heads: int,
    head_dim: int,
    positions: torch.Tensor,
    preparation: HeadPreparation,
    *,
    group: int | None = None,
    num_warps: int = 4,
) -> None:
    """Normalise and rotate the first `heads` heads of qkv [T, at least heads * head_dim] as queries, in place.

    The other arguments are those of `store_heads`.
    """
    assert qkv.stride(1) == 1 and not preparation.is_none
    half_block = next_power_of_2(head_dim // 2)
    group = group or max(1, MAX_PROGRAM_ELEMENTS // (2 * half_block))
    q_groups = cdiv(heads, group)
    if qkv.shape[0]:
        _heads_kernel[(qkv.shape[0], q_groups)](
            qkv,
            None,
            None,
            None,
            positions,
            preparation.queries_cos_sin,
            preparation.keys_cos_sin,
            preparation.q_weight,
            preparation.k_weight,
            None,
            None,
            qkv.stride(0),
            0,
            preparation.eps,
            HEADS=heads,
            KV_HEADS=0,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=1,
            GROUP=group,
            HALF_BLOCK=half_block,
            Q_GROUPS=q_groups,
            KV_GROUPS=0,
            **preparation.options(head_dim),
            FP8=False,
            EARLY=False,
            num_warps=num_warps,
            **early_start.options(qkv.device),
        )


def cos_sin_table(
    frequencies: torch.Tensor, max_len: int, head_dim: int | None = None, magnitude: float = 1.0
) -> torch.Tensor:
    """Return [max_len, D] float32: the cosines of position * frequencies [R / 2], then the sines.

    Both are multiplied by `magnitude`. head_dim: D, by default R. Pairs beyond the frequencies are not rotated.
    """
    positions = torch.arange(max_len, device=frequencies.device).to(torch.float32)
    angles = positions[:, None] * frequencies.to(torch.float32)
    rest = (0, (head_dim or 2 * len(frequencies)) // 2 - len(frequencies))
    return torch.cat((F.pad(angles.cos() * magnitude, rest, value=1.0), F.pad(angles.sin() * magnitude, rest)), -1)


def store_heads_reference(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    preparation: HeadPreparation,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    query, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, -1))
    q = _prepare_reference(query.float(), preparation, preparation.queries_cos_sin, preparation.q_weight, positions)
    k = _prepare_reference(k.float(), preparation, preparation.keys_cos_sin, preparation.k_weight, positions)
    query.copy_(q)
    if kv_scales is not None:
        k = (k / kv_scales[0][:, None]).clamp(-MAX_CODE, MAX_CODE)
        v = (v / kv_scales[1][:, None]).clamp(-MAX_CODE, MAX_CODE)
    kept = (slots >= 0).nonzero().squeeze(1)
    block, offset = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    k_cache[block, offset] = k[kept].to(k_cache.dtype)
    v_cache[block, offset] = v[kept].to(v_cache.dtype)


def turn_heads_reference(
    qkv: torch.Tensor, heads: int, head_dim: int, positions: torch.Tensor, preparation: HeadPreparation
) -> None:
    query = qkv[:, : heads * head_dim].unflatten(-1, (-1, head_dim))
    table, weight = preparation.queries_cos_sin, preparation.q_weight
    query.copy_(_prepare_reference(query.float(), preparation, table, weight, positions))


def _prepare_reference(
    x: torch.Tensor,
    preparation: HeadPreparation,
    cos_sin: torch.Tensor | None,
    weight: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    if weight is not None and not preparation.norm_after:
        x = F.rms_norm(x, weight.shape, weight.float(), preparation.eps)
    if cos_sin is not None:
        cos, sin = cos_sin[positions][:, None].chunk(2, -1)
        x = _rotate_reference(x, cos, sin, preparation.pairs or RotatedPairs(x.shape[-1]))
    if weight is not None and preparation.norm_after:
        x = F.rms_norm(x, weight.shape, weight.float(), preparation.eps)
    return x


def _rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: RotatedPairs) -> torch.Tensor:
    count = pairs.count
    turned, half = x[..., :count], count // 2
    low, high = (turned[..., ::2], turned[..., 1::2]) if pairs.interleaved else turned.chunk(2, -1)
    a, b = low * cos[..., :half] - high * sin[..., :half], high * cos[..., :half] + low * sin[..., :half]
    both = torch.stack((a, b), -1).flatten(-2) if pairs.interleaved else torch.cat((a, b), -1)
    return torch.cat((both, x[..., count:] * cos[..., half:].repeat_interleave(2, -1)), -1)
