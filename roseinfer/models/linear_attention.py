"""Linear attention of a block: gated DeltaNet with its projections."""

import torch

from roseinfer.layers.joint_linear import JointLinear
from roseinfer.layers.linear import Linear, Split, StackedOutput
from roseinfer.models.families.family import DeltaNames, TensorNames
from roseinfer.models.spec import ModelSpec
from roseinfer.models.step import StepContext
from roseinfer.parallel.group import Share, share_of
from roseinfer.quant.base import Norm, WeightSource, read_new
from roseinfer.state.delta_spec import DeltaSpec
from roseinfer.state.gated_delta import DeltaLayer, DeltaWeights, Projected
from roseinfer.state.select import make_delta


class LinearAttention:
    """out(delta(qkvz(norm(x)), ba(norm(x)))). Processes share the key heads, each with its value heads."""

    kv_scales = None

    def __init__(self, spec: ModelSpec, names: DeltaNames, layer: int) -> None:
        delta = spec.layers[layer].delta
        assert delta is not None, "the layer has no linear attention"
        self._index = spec.index_in_kind(layer)
        self._names, self._delta, self._eps = names, delta, spec.norm.eps
        self._layer: DeltaLayer
        self._held: DeltaSpec
        hidden = spec.hidden_size
        stack = _by_key_head if names.by_key_head else _one_after_another
        keys, values = (delta.keys, delta.key_dim), (delta.values, delta.group * delta.value_dim)
        # Checkpoints in FP8 leave the gates' weights in 16 bits.
        gates = stack([(delta.value_heads, delta.group)] * 2)
        self._in = JointLinear(hidden, stack([keys, keys, values, values]), gates)
        self._out = Linear(delta.values, hidden, split=Split.INPUTS, unit=delta.value_dim)

    def load(self, source: WeightSource, names: TensorNames, prefix: str) -> None:
        """Load all weights. Raise `ConfigError` for a group that cannot share the heads, and like
        `WeightSource.read`.
        """
        own = self._names.under(prefix)
        self._held = self._delta.held(source.build.group.size)
        self._in.load(source, [own.qkv] * 3 + [own.z], [own.b, own.a])
        self._out.load(source, own.out)
        self._layer = make_delta(self._held, self._read_weights(source, own))

    def _read_weights(self, source: WeightSource, names: DeltaNames) -> DeltaWeights:
        build, delta, held = source.build, self._delta, self._held
        numbers = torch.empty(2, held.value_heads, dtype=torch.float32, device=build.device)
        for name, into in zip((names.decay, names.dt_bias), numbers, strict=True):
            source.read(name, into, shard=(share_of(build.group, delta.value_heads, unit=delta.group),))
        return DeltaWeights(
            conv=self._read_conv(source, names),
            decay=-numbers[0].exp(),
            dt_bias=numbers[1],
            norm=read_new(source, f"{names.norm}.weight", delta.value_dim, dtype=torch.float32),
            eps=self._eps,
        )

    def _read_conv(self, source: WeightSource, names: DeltaNames) -> torch.Tensor:
        """Return the convolution's weight [taps, channels], stored as [channels, 1, taps]."""
        delta, group = self._delta, source.build.group
        into = torch.empty(self._held.channels, 1, delta.taps, dtype=torch.float32, device=source.build.device)
        before, start = 0, 0
        for width, unit in ((delta.keys, delta.key_dim),) * 2 + ((delta.values, delta.group * delta.value_dim),):
            share = share_of(group, width, unit=unit)
            rows = Share(before + share.start, share.width, delta.channels)
            part = into[start : start + share.width]
            source.read(f"{names.conv}.weight", part, shard=(rows, Share(0, 1, 1), Share(0, delta.taps, delta.taps)))
            before, start = before + width, start + share.width
        return into[:, 0].T.contiguous()

    def __call__(
        self, step: StepContext, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the result for x [T, hidden], plus the residual if there is one, which may be overwritten and may be
        x itself.
        """
        states = step.batch.states
        assert states is not None, "the step has no slots for states"
        both, gates = self._in(norm, x)
        mixed, z = both.split((self._held.channels, self._held.values), -1)
        return self._out(self._layer(self._index, Projected(mixed, z, gates), states), residual)


def _one_after_another(outs: list[tuple[int, int]]) -> list[StackedOutput]:
    """Return outputs of these widths and units."""
    return [StackedOutput(width, unit) for width, unit in outs]


def _by_key_head(outs: list[tuple[int, int]]) -> list[StackedOutput]:
    """Return the same, of a matrix that has one unit of each output for the first key head, then for the second."""
    period = sum(unit for _, unit in outs)
    firsts = [sum(unit for _, unit in outs[:number]) for number in range(len(outs))]
    return [
        StackedOutput(width, unit, stripe=(first, period)) for (width, unit), first in zip(outs, firsts, strict=True)
    ]
