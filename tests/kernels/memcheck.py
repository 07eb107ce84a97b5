"""Launch kernels a few times each at the sizes of real models, for a memory checker; results are checked elsewhere.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.kernels.memcheck

Without that variable PyTorch takes memory in large pieces, and an access just outside a tensor would go unnoticed.
Names of `PARTS` run only these. `planted` writes just past the end of a tensor, which the checker has to find.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from roseinfer.attention.base import AttentionShape
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadNorms, HeadTransform
from roseinfer.attention.rope import Rotary, default_frequencies
from roseinfer.attention.spec import AttentionSpec
from roseinfer.attention.triton_backend import TritonAttention
from roseinfer.core.plan import Row
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.kernels.experts.tiles import Stack
from roseinfer.kernels.linear.activation import gated, pointwise
from roseinfer.kernels.linear.fp8_rows import gated_rows, normed_rows, plain_rows
from roseinfer.kernels.linear.fp8_tile_configs import choose_tile_config
from roseinfer.kernels.linear.fp8_tiles import Parts, tile_product
from roseinfer.kernels.linear.norm import layer_norm, rms_norm
from roseinfer.kernels.linear.normed_product import MAX_ROWS, normed_product
from roseinfer.kernels.linear.skinny import SkinnyNorm, skinny_linear, supports
from roseinfer.kernels.lora.expand_tiles import expand, gated_expanded, gated_rows_expanded
from roseinfer.kernels.lora.shrink_tiles import MAX_SHARED_TILES, shrink_tiles
from roseinfer.kernels.lora.slots import SlotRows
from roseinfer.kernels.sampling.argmax import greedy
from roseinfer.kernels.sampling.draw import draw
from roseinfer.layers.norm import RMSNorm
from roseinfer.quant.base import ExpertShape
from roseinfer.quant.cuda_experts import CudaExperts
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.runner.cuda_inputs import CudaInputs
from roseinfer.runner.forward import Columns
from roseinfer.runner.seats import SeatTable
from roseinfer.state.batch import RowSnapshot, StateBatch, StateRow, StateTables, lay_out, make_tables
from roseinfer.state.delta_spec import DeltaSpec
from roseinfer.state.store import StateStore
from roseinfer.state.triton_delta import TritonDelta
from tests.helpers.attention import store_of
from tests.helpers.delta import draw_tokens, draw_weights
from tests.helpers.slot_matrices import slot_matrices, slots_of_rows

BLOCK = 16
# Rows that products in FP8 take without rounding them.
_FEW = 16


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int
    rotary: bool
    window: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads=self.query, kv_heads=self.kv, head_dim=self.dim, scale=self.dim**-0.5, window=self.window
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """`heads`: of the models. `mixed`: tokens of captured steps that mix chunks and decodes. `linears`: weight rows,
    columns, whether gated, and the numbers of input rows. `eight`: the same of products in FP8, without gates.
    `mixture`: a layer of experts, and the numbers of tokens. `packed`: the same for experts in MXFP4.
    `kv_dtypes`: dtypes of K and V besides `dtype`. `delta`: a layer of gated DeltaNet, whose longest row has `longest`
    tokens. `ranks`: of adapters. `adapted`: numbers of rows with adapters, beside those of `linears`."""

    rows: int
    longest: int
    mixed: tuple[int, ...]
    heads: tuple[Heads, ...]
    vocab: int
    linears: tuple[tuple[int, int, bool, tuple[int, ...]], ...]
    eight: tuple[tuple[int, int, tuple[int, ...]], ...]
    mixture: tuple[ExpertShape, tuple[int, ...]]
    packed: tuple[ExpertShape, tuple[int, ...]]
    wide: tuple[int, int]
    delta: DeltaSpec
    dtype: torch.dtype
    ranks: tuple[int, ...] = (8, 16, 64)
    adapted: tuple[int, ...] = (40, 300, 2100)
    kv_dtypes: tuple[torch.dtype, ...] = (CODES,)


def qwen3_experts(count: int, top_k: int, hidden: int, width: int) -> ExpertShape:
    return ExpertShape(count=count, top_k=top_k, hidden=hidden, width=width, renormalise=True, activation="silu")


def gpt_oss_experts(count: int, top_k: int, width: int) -> ExpertShape:
    options = {"renormalise": True, "activation": "clamped_swish", "bias": True}
    return ExpertShape(count=count, top_k=top_k, hidden=width, width=width, **options)  # type: ignore[arg-type]


# Attention of Qwen3-8B, also with a window, and of GPT-2; products of Qwen3-8B, as many rows as they are used for, and
# the experts of Qwen3-30B-A3B and of gpt-oss-20b.
REAL = Sizes(
    rows=256,
    longest=640,
    mixed=(512, 2048),
    heads=(Heads(32, 8, 128, True), Heads(32, 8, 128, True, 200), Heads(12, 12, 64, False)),
    vocab=151_936,
    linears=(
        (6144, 4096, False, (1, 3)),
        (4096, 4096, False, (1, 16)),
        (24576, 4096, True, (1, 2)),
        (4096, 12288, False, (1, 16)),
        (151_936, 4096, False, (1,)),
    ),
    eight=(
        (6144, 4096, (1, 3, 16, 17, 200)),
        (4096, 4096, (1, 40)),
        (24576, 4096, (2, 100)),
        (4096, 12288, (5, 130, 256)),
    ),
    mixture=(qwen3_experts(128, 8, 2048, 768), (1, 5, 16, 64, 256, 700, 1100)),
    packed=(gpt_oss_experts(32, 4, 2880), (1, 4, 16, 64, 200, 1100, 3000)),
    wide=(2048, 4096),
    delta=DeltaSpec(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4),
    dtype=torch.bfloat16,
)


def attention(sizes: Sizes, device: torch.device) -> None:
    """Run the rows of a step to attention: a full decode step, captured mixed steps with padding, an eager one."""
    for heads, kv_dtype in product(sizes.heads, (sizes.dtype, *sizes.kv_dtypes)):
        bench = _Steps(sizes, heads, kv_dtype, device)
        bench.decodes(sizes.rows)
        bench.decodes(sizes.rows - sizes.rows // 4)
        bench.few(min(3, sizes.rows))
        for tokens in sizes.mixed:
            bench.captured(tokens, tokens)
            bench.captured(tokens, tokens - 13)
        bench.eager(min(sizes.mixed))


def choice(sizes: Sizes, device: torch.device) -> None:
    """Run greedy, drawn and filtered sampling, with columns after the vocabulary, and of few rows in float32."""
    seats = torch.randperm(sizes.rows, device=device)
    settings, integers = _settings(sizes.rows, device)
    for rows, vocab, dtype in ((sizes.rows, sizes.vocab, sizes.dtype), (3, sizes.vocab // 3, torch.float32)):
        logits = torch.empty((rows, vocab + 64), dtype=dtype, device=device).normal_()[:, :vocab]
        pool = torch.zeros((sizes.rows, 50), dtype=torch.int32, device=device)
        ends = torch.full((rows,), 49, dtype=torch.int64, device=device)
        out = torch.empty(rows, dtype=torch.int64, device=device)
        greedy(logits, seats[:rows], ends, pool, out)
        for filtered in (False, True):
            draw(logits, seats[:rows], ends, settings, integers, pool, out, filtered=filtered)


def products(sizes: Sizes, device: torch.device) -> None:
    """Run the fused linears, with a norm before or a residual after, started early where the GPU can."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=sizes.dtype, device=device).normal_()

    for weight_rows, columns, is_gated, counts in sizes.linears:
        weight, norm = normal(weight_rows, columns), SkinnyNorm(normal(columns), 1e-6)
        for rows in counts:
            x = normal(rows, columns)
            if is_gated:
                skinny_linear(x, weight, norm=norm, activation="silu", gated=True, overlap=True)
            else:
                skinny_linear(x, weight, norm=norm, overlap=True)
                residual = normal(rows, weight_rows)
                skinny_linear(x, weight, residual=residual, out=residual, overlap=True)


def adapters(sizes: Sizes, device: torch.device) -> None:
    """Run products with adapters, within their kernels and after them, in slots of several ranks."""
    arrived = torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)
    for weight_rows, columns, is_gated, counts in sizes.linears:
        if weight_rows == sizes.vocab:  # heads have no adapters
            continue
        weight = torch.empty((weight_rows, columns), dtype=sizes.dtype, device=device).normal_()
        half = weight_rows // 2
        matrices = slot_matrices(
            device, columns, (half, weight_rows - half), sizes.dtype, sizes.ranks, max(sizes.ranks)
        )
        norm = SkinnyNorm(torch.ones(columns, dtype=sizes.dtype, device=device), 1e-6)
        for rows in (*counts, *sizes.adapted):
            x = torch.empty((rows, columns), dtype=sizes.dtype, device=device).normal_()
            slots = slots_of_rows(device, rows, len(sizes.ranks))
            if supports(rows, weight):
                options = {"gated": True, "activation": "silu"} if is_gated else {}
                skinny_linear(x, weight, norm=norm, delta=SlotRows(slots, matrices), overlap=True, **options)
            y = torch.zeros((rows, weight_rows), dtype=sizes.dtype, device=device)
            for inputs in (x, *(plain_rows(x, grouped=grouped) for grouped in (True, False))):
                sums = shrink_tiles(inputs, slots, matrices, arrived)
                expand(y, sums)
            if is_gated:
                gated_expanded(y, sums, "silu")
                gated_rows_expanded(y, sums, "silu")


def eight(sizes: Sizes, device: torch.device) -> None:
    """Run products by weights in FP8, of rows in 16 bits and of rows in FP8, their rounding, and small products."""
    parts = Parts.allocate(device)
    for weight_rows, columns, counts in sizes.eight:
        wide = torch.empty((weight_rows, columns), device=device).normal_()
        for block in (False, True):
            weight = Fp8Weight.of(wide, block=block)
            for rows in counts:
                x = torch.empty((rows, 2 * columns), dtype=sizes.dtype, device=device).normal_()
                few = x[:, :columns].contiguous()
                if rows <= _FEW and supports(rows, weight.codes, False, weight.scales):
                    skinny_linear(few, weight.codes, scales=weight.scales, overlap=True)
                norm = x[0, :columns].clone()
                if rows <= MAX_ROWS:
                    normed_product(few, wide[:24].to(sizes.dtype), norm, 1e-6, parts)
                rounded = normed_rows(few, norm, None, 1e-6, grouped=block)
                plain_rows(few, grouped=block)
                gated_rows(x, "silu", grouped=block)
                config = choose_tile_config(rows, weight_rows, columns, blocks=block)
                if config is not None:
                    residual = torch.zeros((rows, weight_rows), dtype=sizes.dtype, device=device)
                    options = {"dtype": sizes.dtype, "residual": residual}
                    tile_product(rounded, weight.codes, weight.scales, config, parts, **options)


def experts(sizes: Sizes, device: torch.device) -> None:
    """Run layers of experts in 16 bits and in FP8, for few tokens and many."""
    shape, counts = sizes.mixture

    def stack(outs: int, columns: int, blocks: bool | None) -> Stack:
        if blocks is None:
            return Stack(torch.empty((shape.count, outs, columns), dtype=sizes.dtype, device=device).normal_())
        weights = torch.empty((shape.count, outs, columns), device=device).normal_().to(CODES)
        per = (outs // 128, columns // 128) if blocks else (outs,)
        return Stack(weights, torch.full((shape.count, *per), 0.02, device=device))

    norm = RMSNorm(shape.hidden, 1e-6)
    norm.weight = torch.ones(shape.hidden, dtype=sizes.dtype, device=device)
    router = torch.empty((shape.count, shape.hidden), dtype=sizes.dtype, device=device).normal_()
    for blocks in (None, True, False):
        gate_up, down = (
            stack(*size, blocks) for size in ((2 * shape.width, shape.hidden), (shape.hidden, shape.width))
        )
        layer = CudaExperts(router, gate_up, down, shape)
        for tokens in counts:
            x = torch.empty((tokens, shape.hidden), dtype=sizes.dtype, device=device).normal_()
            layer(norm, x, x)

    _packed_experts(*sizes.packed, sizes.dtype, device)


def _packed_experts(shape: ExpertShape, counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    def stack(outs: int, columns: int) -> Stack:
        codes = torch.randint(256, (shape.count, outs, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.full((shape.count, outs, columns // 32), 118, dtype=torch.uint8, device=device)
        return Stack(codes, scales, torch.zeros((shape.count, outs), dtype=dtype, device=device))

    norm = RMSNorm(shape.hidden, 1e-6)
    norm.weight = torch.ones(shape.hidden, dtype=dtype, device=device)
    router = torch.empty((shape.count, shape.hidden), dtype=dtype, device=device).normal_()
    gate_up, down = stack(2 * shape.width, shape.hidden), stack(shape.hidden, shape.width)
    layer = CudaExperts(router, gate_up, down, shape, torch.zeros(shape.count, device=device))
    for tokens in counts:
        x = torch.empty((tokens, shape.hidden), dtype=dtype, device=device).normal_()
        layer(norm, x, x)


def rows(sizes: Sizes, device: torch.device) -> None:
    """Run the kernels that work on each row by itself."""
    count, width = sizes.wide
    x = torch.empty((count, 6 * width), dtype=sizes.dtype, device=device).normal_()
    weight = x[0, :width].clone()
    rms_norm(x[:, :width].contiguous(), weight, 1e-6)
    layer_norm(x[:, :width].contiguous(), weight, weight, 1e-5)
    gated(x, "silu")
    pointwise(x, "gelu_tanh")


def delta(sizes: Sizes, device: torch.device) -> None:
    """Rows of one token, longer ones with snapshots, padding; then tables with room that is not used."""
    spec = sizes.delta
    store = StateStore(8, (spec.state(str(sizes.dtype).removeprefix("torch.")),), device)
    layer = TritonDelta(spec, draw_weights(spec, device))
    rows = [StateRow(4, 9, 1), StateRow(0, 0, 1), StateRow(1, 5, sizes.longest), StateRow(2, 0, 3), StateRow(4, 0, 0)]
    for snapshots in ((), (RowSnapshot(0, 1, 5), RowSnapshot(2, 3, 6), RowSnapshot(2, sizes.longest, 7))):
        tokens = draw_tokens(spec, sum(row.tokens for row in rows), sizes.dtype, device)
        layer(0, tokens, StateBatch(store, tuple(rows), snapshots, make_tables(rows, snapshots, device)))
        lines, pieces = lay_out(rows, snapshots, (8, 40))
        tables = StateTables(torch.from_numpy(lines).to(device), torch.from_numpy(pieces).to(device))
        layer(0, tokens, StateBatch(store, tuple(rows), snapshots, tables))


def planted(sizes: Sizes, device: torch.device) -> None:
    """Write tokens for seat 4, while only seats 0 to 3 exist."""
    pool = torch.zeros((4, 8), dtype=torch.int32, device=device)
    logits = torch.randn(1, 100, device=device)
    seat, end, out = (torch.full((1,), value, dtype=torch.int64, device=device) for value in (4, 0, 0))
    greedy(logits, seat, end, pool, out)


PARTS = {
    "attention": attention,
    "choice": choice,
    "products": products,
    "adapters": adapters,
    "eight": eight,
    "experts": experts,
    "rows": rows,
    "delta": delta,
}


class _Steps:
    """Seats with a token pool and scattered blocks, one layer of cache, and the backend."""

    def __init__(self, sizes: Sizes, heads: Heads, kv_dtype: torch.dtype, device: torch.device) -> None:
        self._sizes, self._heads, self._device = sizes, heads, device
        self._rng = random.Random(0)
        each = -(-sizes.longest // BLOCK)
        blocks = sizes.rows * each // 2 + 1
        self._store = store_of(blocks + 1, 1, BLOCK, heads.kv, heads.dim, kv_dtype, device)
        if kv_dtype == CODES:
            self._store.data.view(torch.uint8).random_(0, 0x7F)  # any codes but NaN
        else:
            self._store.data.normal_()
        self._seats = SeatTable(sizes.rows, each * BLOCK, BLOCK, 1000, device, spare_blocks=(blocks,))
        tables = self._seats.block_tables[: sizes.rows]
        tables.copy_(
            torch.randint(blocks, tables.shape, dtype=torch.int32)
        )  # rows may share some, as results are not checked
        self._inputs = CudaInputs(self._seats, sizes.rows, max(sizes.mixed))
        shape = AttentionShape(
            specs=(heads.spec,),
            max_rows=sizes.rows,
            max_tokens=max(sizes.mixed),
            max_model_len=each * BLOCK,
            block_size=BLOCK,
            dtype=sizes.dtype,
            kv_dtype=kv_dtype,
            device=device,
        )
        self._backend = TritonAttention(shape)
        self._transform = _transform(heads, each * BLOCK, sizes.dtype, device)

    def decodes(self, rows: int) -> None:
        columns = Columns.of([self._row(seat, self._rng.randrange(self._sizes.longest), 1) for seat in range(rows)])
        self._inputs.stage_decodes(columns, self._sizes.rows)
        self._attend(self._inputs.decode_batch(self._sizes.rows))

    def few(self, rows: int) -> None:
        self._attend(self._inputs.prepare(Columns.of([self._row(seat, 5 * seat, 1) for seat in range(rows)])).batch)

    def captured(self, bucket: int, tokens: int) -> None:
        columns = self._mixed(tokens)
        first = columns.num_decodes
        counts = columns.count[first:]
        contexts = [start + count for start, count in zip(columns.start[first:], counts, strict=True)]
        backend, rows = self._backend, min(bucket, self._sizes.rows)
        room = backend.max_chunks(bucket, rows, backend.may_divide(bucket))
        chunk_map = backend.map_chunks(bucket, first, counts, contexts, room)
        divided = backend.is_divided(chunk_map)
        room = backend.max_chunks(bucket, rows, divided)
        assert isinstance(chunk_map, np.ndarray) and len(chunk_map) <= room
        self._inputs.stage_mixed(columns, bucket, chunk_map, room)
        self._attend(self._inputs.mixed_batch(bucket, room, divided))

    def eager(self, tokens: int) -> None:
        self._attend(self._inputs.prepare(self._mixed(tokens)).batch)

    def _mixed(self, tokens: int) -> Columns:
        """A quarter of the tokens decode, as far as there are seats; few long chunks take the rest."""
        decodes = min(tokens // 4, self._sizes.rows // 2)
        rows = [self._row(seat, self._rng.randrange(self._sizes.longest), 1) for seat in range(decodes)]
        left = tokens - decodes
        while left:
            last = left <= 2 or len(rows) == self._sizes.rows - 1
            count = left if last else self._rng.randint(2, min(left, self._sizes.longest))
            start = self._rng.randint(0, self._sizes.longest - count)
            rows.append(self._row(len(rows), start, count))
            left -= count
        return Columns.of(rows)

    def _row(self, seat: int, start: int, count: int) -> Row:
        return Row(f"r{seat}", seat, start, count, 1, True, start, 0, ())

    def _attend(self, batch: ForwardBatch) -> None:
        heads = self._heads
        width = (heads.query + 2 * heads.kv) * heads.dim
        qkv = torch.empty((len(batch.input_ids), width), dtype=self._sizes.dtype, device=self._device).normal_()
        self._backend.begin(batch, self._store)
        self._backend.forward(0, qkv, self._transform)


def _transform(heads: Heads, longest: int, dtype: torch.dtype, device: torch.device) -> HeadTransform:
    if not heads.rotary:
        return HeadTransform(heads.spec)
    one = torch.ones(heads.dim, dtype=dtype, device=device)
    norms = HeadNorms(one, one.clone(), one.expand(heads.query + heads.kv, -1).contiguous(), 1e-6)
    frequencies = default_frequencies(heads.dim, 1e6).to(device)
    rotary = Rotary(frequencies, longest)
    rotary.make_tables(longest)  # which a CPU does not need
    return HeadTransform(heads.spec, norms, rotary)


def _settings(seats: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return settings of seats that are greedy, draw from all tokens, and filter in every way. See `draw`."""
    kinds = [(0.0, 1.0, 0.0, 0), (1.0, 1.0, 0.0, 0), (0.7, 0.9, 0.0, 0), (1.0, 1.0, 0.1, 50), (1.3, 0.5, 0.0, 2000)]
    chosen = [kinds[seat % len(kinds)] for seat in range(seats)]
    settings = torch.tensor([kind[:3] for kind in chosen], dtype=torch.float64)
    integers = torch.tensor([(seat, 3, kind[3]) for seat, kind in enumerate(chosen)], dtype=torch.int64)
    return settings.to(device), integers.to(device)


@torch.inference_mode()
def main(argv: Sequence[str], sizes: Sizes = REAL, device: str = "cuda") -> None:
    torch.manual_seed(0)
    for name in argv or PARTS:
        (planted if name == "planted" else PARTS[name])(sizes, torch.device(device))
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{name}: launched")


if __name__ == "__main__":
    main(sys.argv[1:])
