"""Copy-on-write of a step in one launch, over all layers, keys and values."""

import torch

from roseinfer.kernels.common.triton_support import cdiv, tl, triton

BLOCK_ELEMENTS = 2048  # per program


@triton.jit(do_not_specialize=("src_ptr", "dst_ptr", "tokens"))
def _copy_kernel(
    data_ptr,
    src_ptr,
    dst_ptr,
    tokens,
    block_stride,
    PLANE: tl.constexpr,
    TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy, in program (i, plane, j), piece j from src[i] to dst[i] in one layer's keys or values."""
    pair = tl.program_id(0)
    src = tl.load(src_ptr + pair).to(tl.int64)
    dst = tl.load(dst_ptr + pair).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    moved = element < tokens * TOKEN
    at = tl.program_id(1) * PLANE + element
    values = tl.load(data_ptr + src * block_stride + at, mask=moved)
    tl.store(data_ptr + dst * block_stride + at, values, mask=moved)


def copy_blocks(
    data: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    tokens: int,
    *,
    block: int = BLOCK_ELEMENTS,
    num_warps: int = 4,
) -> None:
    """Copy the first `tokens` slots of blocks src[i] -> dst[i] in all layers' keys and values.

    data: [num_blocks, layers, 2, block_size, kv_heads, head_dim], one of `KVStore.parts`. src, dst: [n] integers; no
    block is both a source and a destination, and destinations are distinct.
    """
    _, layers, _, block_size, kv_heads, head_dim = data.shape
    token = kv_heads * head_dim
    if len(src) and tokens:
        _copy_kernel[(len(src), 2 * layers, cdiv(tokens * token, block))](
            data,
            src,
            dst,
            tokens,
            data.stride(0),
            PLANE=block_size * token,
            TOKEN=token,
            BLOCK=block,
            num_warps=num_warps,
        )


def copy_blocks_reference(data: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, tokens: int) -> None:
    slots = data[:, :, :, :tokens]
    slots.index_copy_(0, dst, slots.index_select(0, src))
