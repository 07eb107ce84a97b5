"""EAGLE-3 written as plainly as possible: whole sequences, no cache. Entry t reads token t + 1 and state t."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F


class EagleReference:
    """Head by its tensors, under speculators' names; embed_tokens and lm_head are the target's where it shares them."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        heads: int,
        head_dim: int,
        flags: Sequence[str] = (),
        frequencies: torch.Tensor | None = None,
    ) -> None:
        self.tensors = tensors
        self.heads, self.head_dim = heads, head_dim
        self.flags = flags
        self.frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim) if frequencies is None else frequencies
        drafted = tensors["lm_head.weight"].shape[0]
        shifts = tensors.get("d2t", torch.zeros(drafted, dtype=torch.int64))
        self.targets = torch.arange(drafted) + shifts

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.tensors[f"{name}.weight"]

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def fuse(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        if "fc_norm" in self.flags:
            streams = [self.norm(stream, f"fc_norm.{i}") for i, stream in enumerate(streams)]
        together = torch.cat(list(streams), -1)
        if "norm_before_fc" in self.flags:
            together = self.norm(together, "input_norm")
        return self.product(together, "fc")

    def run(self, tokens: Sequence[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results [T, hidden] and logits [T, drafted] of entries, from T + 1 tokens and T states."""
        layer, attention = "layers.0", "layers.0.self_attn"
        embedded = self.tensors["embed_tokens.weight"][torch.tensor(tokens[1:])]
        normed = self.norm(states, f"{layer}.hidden_norm")
        x = torch.cat((self.norm(embedded, f"{layer}.input_layernorm"), normed), -1)
        residual = normed if "norm_before_residual" in self.flags else states
        count = len(states)
        q, k, v = (self.product(x, f"{attention}.{part}_proj").view(count, -1, self.head_dim) for part in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        k, v = (part.repeat_interleave(self.heads // k.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1) > 0, -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = residual + self.product(attended, f"{attention}.o_proj")
        x = self.norm(residual, f"{layer}.post_attention_layernorm")
        gate, up = self.product(x, f"{layer}.mlp.gate_proj"), self.product(x, f"{layer}.mlp.up_proj")
        out = residual + self.product(F.silu(gate) * up, f"{layer}.mlp.down_proj")
        return out, self.product(self.norm(out, "norm"), "lm_head")

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None, None] * self.frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def draft(
        self, tokens: Sequence[int], streams: Sequence[torch.Tensor], count: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Return the greedy drafts that follow all tokens, and the logits [drafted] of each.

        streams: of each token but the last one.
        """
        known, states = list(tokens), self.fuse(streams)
        drafts, logits = [], []
        for _ in range(count):
            out, found = self.run(known, states)
            logits.append(found[-1])
            drafts.append(int(self.targets[found[-1].argmax()]))
            known.append(drafts[-1])
            state = self.norm(out[-1:], "norm") if "norm_output" in self.flags else out[-1:]
            states = torch.cat((states, state))
        return drafts, logits
