"""Sequences through a layer of gated DeltaNet, compared with the serial rule over their whole history."""

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from roseinfer.kernels.delta.rule import gates, serial_rule, unit
from roseinfer.state.batch import RowSnapshot, StateBatch, StateRow, StateTables, make_tables
from roseinfer.state.delta_spec import DeltaSpec
from roseinfer.state.gated_delta import DeltaLayer, DeltaWeights, Projected
from roseinfer.state.store import StateStore

MakeLayer = Callable[[DeltaSpec, DeltaWeights], DeltaLayer]


def draw_weights(spec: DeltaSpec, device: torch.device) -> DeltaWeights:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    heads = spec.value_heads
    norm = normal(spec.value_dim)
    conv = normal(spec.taps, spec.channels) * 0.5
    return DeltaWeights(conv=conv, decay=-normal(heads).exp() * 0.2, dt_bias=normal(heads), norm=norm, eps=1e-6)


def draw_tokens(spec: DeltaSpec, count: int, dtype: torch.dtype, device: torch.device) -> Projected:
    """Draw projections as columns of a wider tensor, as one product for all of them gives them."""
    widths = (spec.channels, spec.values)
    wide = torch.randn(count, sum(widths) + 8, device=device).to(dtype)
    mixed, z, _ = wide.split((*widths, 8), -1)
    return Projected(mixed, z, torch.randn(count, 2 * spec.value_heads, device=device).to(dtype))


def expected_output(spec: DeltaSpec, weights: DeltaWeights, tokens: Projected) -> torch.Tensor:
    """Return the layer's output for a whole sequence that begins with nothing, in float32."""
    mixed = tokens.mixed.float()
    padded = F.pad(mixed, (0, 0, spec.taps - 1, 0))
    convolved = sum(padded[tap : tap + len(mixed)] * weights.conv[tap] for tap in range(spec.taps))
    q, k, v = F.silu(convolved).split((spec.keys, spec.keys, spec.values), -1)
    q, k = (x.unflatten(-1, (spec.key_heads, spec.key_dim)) for x in (q, k))
    b, a = tokens.gates.chunk(2, -1)
    g, beta = gates(b, a, weights.decay, weights.dt_bias)
    state = torch.zeros(spec.value_heads, spec.key_dim, spec.value_dim, device=mixed.device)
    v = v.unflatten(-1, (spec.value_heads, spec.value_dim))
    output, _ = serial_rule(unit(q, spec.key_dim**-0.5), unit(k), v, g, beta, state)
    normed = F.rms_norm(output, output.shape[-1:], weights.norm, weights.eps)
    return normed.flatten(1) * F.silu(tokens.z.float())


class DeltaRunner:
    """Layer with a store of two layers' states, of which it uses the second. Unused slots hold NaN."""

    def __init__(
        self,
        make: MakeLayer,
        spec: DeltaSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        slots: int = 8,
        row_drafts: int = 0,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.weights = draw_weights(spec, device)
        self._layer = make(spec, self.weights)
        state = spec.state(str(dtype).removeprefix("torch."), row_drafts)
        self.store = StateStore(slots, (state, state), device)
        for tensor in self.store.tensors:
            tensor.fill_(float("nan"))

    def sequence(self, count: int) -> tuple[Projected, torch.Tensor]:
        """Return a sequence's projections, and the outputs that are expected for it."""
        tokens = draw_tokens(self.spec, count, self.dtype, self.device)
        return tokens, expected_output(self.spec, self.weights, tokens)

    def run(
        self, rows: Sequence[tuple[Projected, int, int, int, *tuple[int, ...]]], snapshots: Sequence[RowSnapshot] = ()
    ) -> list[torch.Tensor]:
        """Return the output of each row. rows: a sequence's projections, and the fields of a `StateRow`."""
        layout = [StateRow(*fields) for _, *fields in rows]
        parts = [[x[start : start + tokens] for x in sequence] for sequence, _, start, tokens, *_ in rows]
        mixed_z = torch.cat([torch.cat(part[:2], -1) for part in parts])
        mixed, z = mixed_z.split((self.spec.channels, self.spec.values), -1)
        projected = Projected(mixed, z, torch.cat([part[2] for part in parts]))
        tables: StateTables = make_tables(layout, snapshots, self.device)
        batch = StateBatch(self.store, tuple(layout), tuple(snapshots), tables)
        return list(self._layer(1, projected, batch).split([row.tokens for row in layout]))


def check_drafts(
    runner: DeltaRunner, most: int, check: Callable[[torch.Tensor, torch.Tensor], None], seed: int, length: int = 40
) -> None:
    """Check two sequences whose rows have up to `most` drafts, some of them wrong, and snapshots among them."""
    rng = random.Random(seed)
    pairs = [runner.sequence(length), runner.sequence(length)]
    first = rng.randint(1, 6)
    runner.run([(sequence, slot, 0, first) for slot, (sequence, _) in enumerate(pairs)])
    starts, replayed = [first, first], [0, 0]
    while max(starts) + most + 4 < length:
        rows, rights, snapshots = [], [], []
        for slot, (sequence, _) in enumerate(pairs):
            drafts = rng.choice([0, 0, most, rng.randint(0, most)])
            right = rng.randint(0, drafts)
            end, stop = starts[slot] + 1 + right, starts[slot] + 1 + drafts
            wrong = draw_tokens(runner.spec, stop - end, runner.dtype, runner.device)
            drawn = Projected(*(torch.cat((x[:end], y, x[stop:])) for x, y in zip(sequence, wrong, strict=True)))
            rows.append((drawn, slot, starts[slot], 1 + drafts, drafts, replayed[slot]))
            rights.append(right)
            if rng.random() < 0.7:
                snapshots.append(RowSnapshot(slot, rng.randint(1 - replayed[slot], 1), 4 + slot))
        order = sorted(range(2), key=lambda slot: rows[slot][3] > 1)
        placed = [snapshot._replace(row=order.index(snapshot.row)) for snapshot in snapshots]
        outputs = runner.run([rows[slot] for slot in order], placed)
        for slot, output in zip(order, outputs, strict=True):
            check(output[: 1 + rights[slot]], pairs[slot][1][starts[slot] : starts[slot] + 1 + rights[slot]])
        for slot, tokens, target in snapshots:
            position = starts[slot] + tokens
            sequence, expected = pairs[slot]
            check(runner.run([(sequence, target, position, 1)])[0], expected[position : position + 1])
            check(runner.run([(sequence, target, position + 1, 3)])[0], expected[position + 1 : position + 4])
        starts = [start + 1 + right for start, right in zip(starts, rights, strict=True)]
        replayed = rights
