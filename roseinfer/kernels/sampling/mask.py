"""Masking of forbidden logits with -inf, in one launch over the affected rows, for any dtype of the logits."""

import torch

from roseinfer.kernels.common.triton_support import cdiv, tl, triton

CHUNK_TOKENS = 4096  # per program


@triton.jit(do_not_specialize=("rows_ptr", "words_ptr"))
def _mask_kernel(logits_ptr, rows_ptr, words_ptr, vocab_size, logits_stride, words_stride, CHUNK: tl.constexpr):
    """Mask, in program (line, chunk), a chunk of the line's row; allowed logits are not touched."""
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    word = tl.load(words_ptr + line * words_stride + token // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    at = logits_ptr + tl.load(rows_ptr + line).to(tl.int64) * logits_stride + token
    # Added instead of assigned, so that NaN stays visible.
    x = tl.load(at, mask=forbidden, other=0.0).to(tl.float32) + float("-inf")
    tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=forbidden)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Add -inf to the forbidden logits of some rows.

    logits: [n, V], its rows may be apart. Line i of `words` ([m, >= ceil(V / 32)] int32) belongs to row rows[i] ([m]
    int32): bit v % 32 of integer v // 32 is set if token v is allowed.
    """
    assert logits.stride(1) == 1 and words.stride(1) == 1
    if len(rows):
        grid = (len(rows), cdiv(logits.shape[1], CHUNK_TOKENS))
        _mask_kernel[grid](logits, rows, words, logits.shape[1], logits.stride(0), words.stride(0), CHUNK=CHUNK_TOKENS)
