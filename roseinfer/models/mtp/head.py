"""Multi-token prediction head: one layer of the model's own kind, after a fusion of a token and the state before it.

Its input at position p is token p and the state of position p - 1: the model's after its final norm where it is known,
and otherwise the head's own after its norm. It predicts token p + 1, with the model's embedding and output matrix.
Entries of its KV layer are numbered as those of `EagleHead`.
"""

import torch

from roseinfer.attention.rope import Rotary
from roseinfer.layers.linear import Linear, Split
from roseinfer.models.block import make_block, make_norm
from roseinfer.models.eagle.head import HeadTarget
from roseinfer.models.families.family import TensorNames
from roseinfer.models.mtp.spec import MtpSpec
from roseinfer.models.step import StepContext
from roseinfer.quant.base import Build, WeightSource

PREFIX = "mtp"


class MtpHead:
    """Head for one target. It is built without memory; `load` gives it weights.

    target_ids: [vocabulary] int64: each token is the target's of the same number.
    """

    def __init__(self, spec: MtpSpec, target: HeadTarget, names: TensorNames, build: Build) -> None:
        model, hidden = spec.after(target.spec), spec.hidden_size
        self.spec = spec
        self.attention = spec.attention
        self.target_ids = torch.arange(model.vocab_size, device=build.device)
        self._target = target
        self._token_norm, self._state_norm, self._norm = (make_norm(model) for _ in range(3))
        self._fc = Linear(2 * hidden, hidden, split=Split.OUTPUTS)
        rope, rotary = spec.layer.rope, None
        if rope is not None:
            rotary = Rotary.of(rope, spec.attention.head_dim, model.max_position, build.device)
        self._block = make_block(model, names, target.spec.num_layers, rotary)

    def load(self, source: WeightSource) -> None:
        """Load all weights. Raise `UnsupportedModelError` naming a tensor that is missing or misshaped."""
        self._fc.load(source, f"{PREFIX}.fc")
        self._token_norm.load(source, f"{PREFIX}.pre_fc_norm_embedding")
        self._state_norm.load(source, f"{PREFIX}.pre_fc_norm_hidden")
        self._block.load(source, f"{PREFIX}.layers.0")
        self._norm.load(source, f"{PREFIX}.norm")
        self._lm_head = self._target.head_after(self._norm)

    # --- forward ------------------------------------------------------------------------------------------------
    def fuse(self, streams: torch.Tensor) -> torch.Tensor:
        """Return states [T, hidden] of the target's last stream [T, hidden]."""
        return self._target.normed(streams)

    def write(self, ids: torch.Tensor, states: torch.Tensor, step: StepContext) -> None:
        """Write K and V of a step's tokens. ids: [T]; states: [T, hidden], those of the positions before."""
        self._block.write(self._inputs(ids, states), step)

    def forward(self, ids: torch.Tensor, states: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the residual stream [T, hidden] after the layer, and write K and V. Arguments as for `write`."""
        return self._block(self._inputs(ids, states), step)

    def _inputs(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self._fc(torch.cat((self._token_norm(self._target.embed(ids)), self._state_norm(states)), -1))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [L, vocabulary] for x [L, hidden] of `forward`."""
        return self._lm_head(x)

    def next_states(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states [L, hidden] that the next drafts are made from, for x of `forward`."""
        return self._norm(x)
