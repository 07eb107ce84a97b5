"""Loader of EAGLE-3 heads: from safetensors, or with random weights."""

from collections.abc import Sequence
from pathlib import Path

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.eagle.head import EagleHead, HeadTarget
from roseinfer.models.eagle.spec import EagleSpec
from roseinfer.models.loader import Checkpoint, DummyWeights
from roseinfer.parallel.group import Share, SingleRank
from roseinfer.quant.base import Build
from roseinfer.quant.plain import PlainFormat

# Tensors without effect: the inverse of d2t, and frequencies that follow from the config.
_IGNORED = ("t2d", r"(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq")


def load_eagle_head(folder: Path, spec: EagleSpec, target: HeadTarget, *, load_format: str, seed: int) -> EagleHead:
    """Return the head in `folder`, ready to run, in the target's dtype and on its device. Every rank holds all of it.

    `load_format`, `seed`: as for `load_model`; a random head can draft equally spaced tokens. Raise
    `ModelNotFoundError` without weights, and `UnsupportedModelError` naming a tensor that is missing, misshaped,
    unexpected or not finite.
    """
    build = Build(target.dtype, target.device, SingleRank(), PlainFormat())
    head = EagleHead(spec, target, build)
    if load_format == "dummy":
        drafted = torch.arange(spec.draft_vocab_size, device=build.device)
        head.load(DummyWeights(seed, build), drafted * spec.vocab_size // spec.draft_vocab_size)
        return head
    with HeadCheckpoint(folder, build) as checkpoint:
        head.load(checkpoint, checkpoint.target_ids(spec))
        checkpoint.refuse_unread(_IGNORED)
        checkpoint.refuse_not_finite()
    return head


class HeadCheckpoint(Checkpoint):
    """Checkpoint of a head. Rows of its output matrix are read in ascending order of the target's tokens."""

    def __init__(self, folder: Path, build: Build) -> None:
        super().__init__(folder, build)
        self._order: torch.Tensor | None = None

    def target_ids(self, spec: EagleSpec) -> torch.Tensor:
        """Return `EagleHead.target_ids`. Raise `UnsupportedModelError` if they are no distinct tokens of the target."""
        drafted = spec.draft_vocab_size
        if "d2t" not in self and drafted == spec.vocab_size:
            return torch.arange(drafted, device=self.build.device)
        self.skip("d2t")
        shifts = self._holder["d2t"].get_tensor("d2t")
        if shifts.dtype not in (torch.int64, torch.int32) or shifts.shape != (drafted,):
            wanted = f"{drafted} integers are needed"
            raise UnsupportedModelError(f"tensor d2t is {list(shifts.shape)} of {shifts.dtype}; {wanted}")
        ids, order = torch.sort(torch.arange(drafted) + shifts.long())
        if int(ids[0]) < 0 or int(ids[-1]) >= spec.vocab_size or not bool((ids.diff() > 0).all()):
            raise UnsupportedModelError(f"tensor d2t does not lead to distinct tokens of {spec.vocab_size}")
        if not torch.equal(order, torch.arange(drafted)):
            self._order = order.to(self.build.device)
        return ids.to(self.build.device)

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        super().read(name, into, shard=shard, transposed=transposed)
        if name == "lm_head.weight" and self._order is not None:
            into.copy_(into.index_select(0, self._order))
