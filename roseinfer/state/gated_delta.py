"""Layer of gated DeltaNet, between its projections: convolution, delta rule and gated norm, over states in slots."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from roseinfer.kernels.delta.rule import chunked_rule, gates, one_token_each, unit
from roseinfer.state.batch import StateBatch, StateRow
from roseinfer.state.delta_spec import GATES, MEMORY, WINDOW, DeltaSpec

# Tokens of a row that are computed at a time, so that intermediate results stay in a core's cache.
MAX_SEGMENT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """Weights of one layer, in float32.

    conv: [taps, channels], the current token's tap last. decay: [value heads], -e^A_log. dt_bias: [value heads].
    norm: [value_dim], of the RMSNorm of each head's output.
    """

    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


class Projected(NamedTuple):
    """Projections of a step's tokens; rows of tokens may be apart.

    mixed: [T, channels], queries, keys and values. z: [T, values], the gate of the output. gates: [T, 2 * value heads],
    b of each head (how much is written), then a (how fast it decays).
    """

    mixed: torch.Tensor
    z: torch.Tensor
    gates: torch.Tensor


class DeltaLayer(Protocol):
    """Gated delta rule of one layer over a step's rows.

    The convolution over the last `taps` tokens and SiLU give queries, keys and values. Queries and keys have unit
    length, and queries are scaled by key_dim^-0.5. The output is rms_norm(o) * silu(z) for each head.
    """

    def __call__(self, layer: int, projected: Projected, states: StateBatch) -> torch.Tensor:
        """Return [T, values] in the projections' dtype, and update the rows' slots. layer: index among the layers with
        states.
        """
        ...


class TorchDelta:
    """`DeltaLayer` in PyTorch: rows of one token together, longer ones one after another in chunks."""

    def __init__(self, spec: DeltaSpec, weights: DeltaWeights) -> None:
        self._spec = spec
        self._weights = weights

    def __call__(self, layer: int, projected: Projected, states: StateBatch) -> torch.Tensor:
        memory, window = states.store.part(layer, MEMORY), states.store.part(layer, WINDOW)
        kept = states.store.find(layer, GATES)
        outputs, first = projected.z.new_zeros(projected.z.shape), 0
        singles = []
        for number, row in enumerate(states.rows):
            tokens = range(first, first + row.tokens)
            if row.tokens == 1 and not row.replayed:
                singles.append((first, row))
            elif row.tokens:
                cuts = {tokens: slot for of, tokens, slot in states.snapshots if of == number}
                part = Projected(*(x[tokens.start : tokens.stop] for x in projected))
                outputs[tokens.start : tokens.stop] = self._long_row(row, part, cuts, memory, window, kept)
            first = tokens.stop
        if singles:
            at = torch.tensor([place for place, _ in singles], device=outputs.device)
            part = Projected(*(x.index_select(0, at) for x in projected))
            outputs.index_copy_(0, at, self._single_tokens([row for _, row in singles], part, memory, window))
        for number, _, slot in states.snapshots:
            row = states.rows[number]
            if row.tokens == 1 and not row.replayed:
                memory[slot], window[slot] = memory[row.slot], window[row.slot]
        return outputs

    def _long_row(
        self,
        row: StateRow,
        part: Projected,
        cuts: dict[int, int],
        memory: torch.Tensor,
        window: torch.Tensor,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output of a row [tokens, values]. cuts: slots of its snapshots by tokens before them. kept: gates
        of drafts.
        """
        taps, entries, first = self._spec.taps, window.shape[1], row.start - row.replayed
        held = window[row.slot]
        before = range(first - taps, row.start)
        old = torch.stack([held[p % entries] if p >= 0 else torch.zeros_like(held[0]) for p in before])
        inputs = torch.cat((old, part.mixed))  # at positions from first - taps on
        if row.replayed:
            assert kept is not None, "the store has no room for drafts"
            part = self._with_replayed(row, part, kept)
        state = memory[row.slot].clone() if first else torch.zeros_like(memory[row.slot])
        cuts = {row.replayed + tokens: slot for tokens, slot in cuts.items()}
        total = row.replayed + row.tokens
        known = total - row.drafts
        found, begin = [], 0
        for end in sorted({*cuts, *range(MAX_SEGMENT_TOKENS, total, MAX_SEGMENT_TOKENS), known, total}):
            output, state = self._segment(
                inputs[begin + 1 : end + taps], Projected(*(x[begin:end] for x in part)), state
            )
            found.append(output)
            last = torch.arange(first + end - taps, first + end, device=inputs.device) % entries
            for slot in ([cuts[end]] if end in cuts else []) + ([row.slot] if end == known else []):
                memory[slot] = state
                window[slot, last] = inputs[end : end + taps]
            begin = end
        if row.drafts:
            assert kept is not None, "the store has no room for drafts"
            at = torch.arange(first + known, first + total, device=inputs.device) % entries
            window[row.slot, at] = inputs[-row.drafts :]
            kept[row.slot, at] = part.gates[-row.drafts :]
        return torch.cat(found)[row.replayed :]

    def _with_replayed(self, row: StateRow, part: Projected, kept: torch.Tensor) -> Projected:
        """Return a row's projections after those of the tokens that it replays, whose outputs do not matter."""
        entries = kept.shape[1]
        at = torch.arange(row.start - row.replayed, row.start, device=kept.device) % entries
        mixed, z = (torch.cat((x.new_zeros(row.replayed, x.shape[1]), x)) for x in part[:2])
        return Projected(mixed, z, torch.cat((kept[row.slot, at], part.gates)))

    def _segment(self, inputs: torch.Tensor, part: Projected, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of some tokens, and the state after them.

        inputs: [taps - 1 + tokens, channels], of which the first ones are before the tokens.
        """
        wide = inputs.float()
        convolved = wide[: len(part.mixed)] * self._weights.conv[0]
        for tap in range(1, self._spec.taps):
            convolved.addcmul_(wide[tap:][: len(part.mixed)], self._weights.conv[tap])
        output, state = chunked_rule(*self._heads(convolved), *self._gates(part), state)
        return self._gated(output, part.z), state

    def _single_tokens(
        self, rows: list[StateRow], part: Projected, memory: torch.Tensor, window: torch.Tensor
    ) -> torch.Tensor:
        taps, entries = self._spec.taps, window.shape[1]
        places = torch.tensor([(row.slot, row.start) for row in rows], device=memory.device)
        slots, starts = places.unbind(1)
        window[slots, starts % entries] = part.mixed
        convolved = torch.zeros(part.mixed.shape, device=memory.device)
        for tap in range(taps):
            position = starts - (taps - 1 - tap)
            held = window[slots, position % entries] * self._weights.conv[tap]
            convolved += held.masked_fill_((position < 0)[:, None], 0.0)
        q, k, v = self._heads(convolved)
        g, beta = self._gates(part)
        found = memory.index_select(0, slots).masked_fill_((starts == 0).view(-1, 1, 1, 1), 0.0)
        output = one_token_each(q, k, v, g, beta, found)
        memory.index_copy_(0, slots, found)
        return self._gated(output, part.z)

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self._spec
        q, k, v = F.silu(convolved).split((spec.keys, spec.keys, spec.values), -1)
        q, k = (x.unflatten(-1, (spec.key_heads, spec.key_dim)) for x in (q, k))
        return unit(q, spec.key_dim**-0.5), unit(k), v.unflatten(-1, (spec.value_heads, spec.value_dim))

    def _gates(self, part: Projected) -> tuple[torch.Tensor, torch.Tensor]:
        b, a = part.gates.chunk(2, -1)
        return gates(b, a, self._weights.decay, self._weights.dt_bias)

    def _gated(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for o [T, value heads, V]."""
        normed = F.rms_norm(output, output.shape[-1:], self._weights.norm, self._weights.eps)
        return (normed.flatten(1) * F.silu(z.float())).to(z.dtype)
