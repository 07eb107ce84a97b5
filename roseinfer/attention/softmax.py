"""Attention of a few sequences in one call of PyTorch, with or without sinks."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Devices with a kernel that returns denominators, for any mask.
FUSED_DEVICES = ("cpu",)


@dataclass(frozen=True, slots=True)
class Softmax:
    """Weights of one layer's attention: softmax(scale * q K^T), for all heads [heads].

    sinks: [heads] float32, see `AttentionSpec.sinks`; None without them.
    """

    scale: float
    sinks: torch.Tensor | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
    ) -> torch.Tensor:
        """Return the attention [n, rows, T, D] of queries of that shape over k and v [n, kv_heads, K, D].

        Rows and their queries are heads and their tokens, or KV heads and the heads that share each. mask: added to the
        scores. causal: each query sees the keys up to its own, without a mask.
        """
        grouped = q.shape[1] != k.shape[1]
        if self.sinks is None:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        out, total = _with_logsumexp(q, k, v, mask, causal, self.scale)
        # Heads are the rows, or the rows' queries.
        sinks = self.sinks[:, None] if self.sinks.numel() == q.shape[1] else self.sinks.view(q.shape[1:3])
        return (out * (total - sinks).sigmoid()[..., None]).to(q.dtype)


def _with_logsumexp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention, and the logarithm [n, rows, T] of the denominators, in float32."""
    if q.device.type in FUSED_DEVICES:
        fused: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return fused
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if causal:
        scores += torch.full(scores.shape[-2:], float("-inf"), device=q.device).triu_(1)
    if mask is not None:
        scores += mask
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)
