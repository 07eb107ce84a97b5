"""Order of experts by a token's logits, for kernels.

Logits are compared as integers that no two experts share: the bits of a float32, mapped so that integers have its
order, with the expert's number in the last bits. So one comparison decides which of two experts comes first, also for
equal logits, where the lower number does. Logits count as equal if they agree in all other bits: in 15 of the
mantissa's 23, with 128 experts.
"""

from roseinfer.kernels.common.triton_support import tl, triton


@triton.jit
def read_logits(pointer, expert, E: tl.constexpr):
    """Load logits, bypassing the L1 cache, which may hold those of an earlier layer."""
    return tl.load(pointer + expert, mask=expert < E, other=-float("inf"), cache_modifier=".cg")


@triton.jit
def sort_keys(logits, expert, E_PAD: tl.constexpr):
    """Return int32 keys, the larger the earlier; they differ by at most 2^31. E_PAD: a power of two > all experts."""
    bits = logits.to(tl.int32, bitcast=True)
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 1
    return (bits & -E_PAD) | (E_PAD - 1 - expert)


@triton.jit
def expert_of(key, E: tl.constexpr, E_PAD: tl.constexpr):
    """Return the expert with that key; for NaN logits an arbitrary but existing one."""
    return tl.minimum(E_PAD - 1 - (key & (E_PAD - 1)), E - 1)


@triton.jit
def expert_at(pointer, place, E: tl.constexpr, E_PAD: tl.constexpr):
    """Return the expert at a place in the order of the logits at `pointer`.

    Its place is the number of experts before it. Unless experts are very many, all are compared with all: no comparison
    waits for another one, as in a search for one expert after another.
    """
    expert = tl.arange(0, E_PAD)
    keys = sort_keys(read_logits(pointer, expert, E), expert, E_PAD)
    if E_PAD <= 128:
        before = tl.sum((keys[None, :] - keys[:, None]) >> 31, 0)  # minus one for each
        keys = tl.where(before == -place, keys, -2147483648)
    else:
        for _ in range(place):
            keys = tl.where(keys == tl.max(keys, 0), -2147483648, keys)
    return expert_of(tl.max(keys, 0), E, E_PAD)


@triton.jit
def first_experts(
    pointer, E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, RENORMALISE: tl.constexpr
):
    """Return the TOP_K first experts, [K_PAD] int32, and their weights, float32."""
    expert, place = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    logits = read_logits(pointer, expert, E)
    keys = sort_keys(logits, expert, E_PAD)
    found = tl.zeros([K_PAD], tl.int32)
    for i in tl.static_range(TOP_K):
        first = tl.max(keys, 0)
        found = tl.where(place == i, expert_of(first, E, E_PAD), found)
        keys = tl.where(keys == first, -2147483648, keys)
    chosen = tl.load(pointer + found, mask=place < TOP_K, other=-float("inf"), cache_modifier=".cg")
    if RENORMALISE:
        shares = tl.exp(chosen - tl.max(chosen, 0))
        return found, shares / tl.sum(shares, 0)
    else:
        peak = tl.max(logits, 0)
        return found, tl.exp(chosen - peak) / tl.sum(tl.exp(logits - peak), 0)
