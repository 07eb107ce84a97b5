"""RMSNorm of whole projections, of which several ranks hold a share each."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.projection_norm import load_projection_norm
from roseinfer.parallel.group import share_of
from tests.helpers.weights import BUILD, Imagined, Named

SPEC = AttentionSpec(heads=8, kv_heads=2, head_dim=4, scale=0.5)
QUERIES, KEYS = SPEC.heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim


@dataclass(frozen=True)
class Summing(Imagined):
    """A rank that sends its part to `sent`, or gets the sum of all parts in it."""

    sent: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if len(self.sent) == self.size:
            return torch.stack(self.sent).sum(0)
        self.sent.append(x)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_norm_their_heads_as_one_rank_norms_all(size: int, dtype: torch.dtype) -> None:
    """Ranks may hold the same KV head: two of four hold each."""
    torch.manual_seed(0)
    tensors = {"q.weight": torch.randn(QUERIES, dtype=dtype), "k.weight": torch.randn(KEYS, dtype=dtype)}
    qkv = torch.randn(5, QUERIES + 2 * KEYS).to(dtype)
    build = replace(BUILD, dtype=dtype)
    whole = qkv.clone()
    load_projection_norm(Named(tensors, build), ("q", "k"), SPEC, 1e-6)(whole)
    assert torch.equal(whole[:, QUERIES + KEYS :], qkv[:, QUERIES + KEYS :]), "values stay"
    sent: list[torch.Tensor] = []
    for rank in [*range(size), *range(size)]:  # the second time, each gets the sum of what all sent
        group = Summing(rank, size, sent=sent)
        heads = share_of(group, QUERIES, unit=4)
        kv = share_of(group, KEYS, unit=4, repeat=True)
        starts = (heads, replace(kv, start=QUERIES + kv.start), replace(kv, start=QUERIES + KEYS + kv.start))
        columns = torch.cat([torch.arange(share.start, share.start + share.width) for share in starts])
        part = qkv[:, columns].clone()
        complete = len(sent) == size
        load_projection_norm(Named(tensors, replace(build, group=group)), ("q", "k"), SPEC, 1e-6)(part)
        if complete:
            torch.testing.assert_close(part, whole[:, columns])
