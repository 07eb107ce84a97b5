"""Time of a model's layer in a step, by the step's shape and by kernel.

    python -m benchmarks.layer_chain MODEL [--steps 24x600 1x600/5 24x600+512 +8192] [--layers 4] [--profile]
                                     [--adapters 8 --rank 16]

A few layers of a model of the GPU table run one after the other in a CUDA graph, as in an engine: each with its own
weights and K/V, so that none are found in the L2 cache, and with kernels that start while their predecessors end. A
step is decoding rows x context, + tokens of prompts of at most 1,024. Rows / TOKENS compute so many tokens each, as to
verify drafts; such a step is padded as the engine does it. `--chunks` computes them as prompts. `--adapters` gives rows
LoRA adapters in turn. A change to a kernel
shows here as the engine will see it, in a tenth of the time of an engine's start. Needs a CUDA GPU and Triton.
"""

import argparse
import json
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu_table import gpu, torch_versions
from benchmarks.model_folders import write_folder
from roseinfer.adapters.adapting import Adapting
from roseinfer.adapters.slots import DeviceSlots
from roseinfer.attention.base import AttentionShape
from roseinfer.attention.batch import AdapterRows, ForwardBatch, Paging
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.triton_backend import TritonAttention
from roseinfer.bench.report import host
from roseinfer.core.config.engine import ModelConfig
from roseinfer.kernels.attention.decode_few import MAX_QUERIES
from roseinfer.kernels.common.compile_ahead import compiling
from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import load_model
from roseinfer.runner.mixed_graphs import mixed_buckets, short_row_buckets
from roseinfer.state.batch import StateBatch, StateRow
from roseinfer.state.store import StateStore

STEPS = ("24x600", "64x600", "256x600", "24x600+512", "+8192")
BLOCK_SIZE, LONGEST_PROMPT, MAX_MODEL_LEN = 16, 1024, 16384
SAMPLES, REPLAYS = 7, 3


class Part(NamedTuple):
    """Row of a step: position of its first token, and number of tokens."""

    start: int
    tokens: int


def read_step(text: str) -> list[Part]:
    """Parse ROWSxCONTEXT[/TOKENS], +TOKENS, or both. Contexts vary by 30 tokens around the given one. Raises
    ValueError.
    """
    found = re.fullmatch(r"(?:(\d+)x(\d+)(?:/(\d+))?)?(?:\+(\d+))?", text)
    if not text or found is None:
        raise ValueError(f"{text}: ROWSxCONTEXT[/TOKENS], +TOKENS of prompts, or both are wanted")
    rows, context, each, prompts = (int(number or 0) for number in found.groups())
    decodes = [Part(max(0, context + i * 37 % 61 - 30), each or 1) for i in range(rows)]
    count = -(-prompts // LONGEST_PROMPT)
    return decodes + [Part(0, prompts * (i + 1) // count - prompts * i // count) for i in range(count)]


@dataclass(frozen=True)
class Chain:
    """Layers with an attention backend and a KV store filled with noise. adapters: how many they have slots for.
    states: of layers that have them, a slot for each row.
    """

    model: CausalLM
    attention: TritonAttention
    store: KVStore
    adapters: int = 0
    states: StateStore | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.attention.begin(batch, self.store)
        return self.model.forward(batch, self.attention)


def make_chain(
    name: str,
    layers: int,
    blocks: int,
    tokens: int,
    rows: int,
    device: torch.device,
    adapters: int = 0,
    rank: int = 16,
) -> Chain:
    """Build the first layers of the table's model `name` with dummy weights, for steps up to this many tokens and
    rows. adapters: of this rank, with random matrices.
    """
    adapting = Adapting((), device) if adapters else None
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(name, Path(folder))
        config = json.loads((path / "config.json").read_text())
        config.get("text_config", config)["num_hidden_layers"] = layers
        (path / "config.json").write_text(json.dumps(config))
        spec = read_model_spec(path, MAX_MODEL_LEN)
        options = ModelConfig(dtype="bfloat16", load_format="dummy")
        model = load_model(path, spec, options, device, adapting=adapting)
    if adapting is not None:
        fill_slots(adapting, adapters, rank, device)
    store = KVStore(blocks, BLOCK_SIZE, model.attention, torch.bfloat16, device)
    store.data.normal_()
    shape = AttentionShape(
        specs=model.attention,
        max_rows=rows,
        max_tokens=tokens,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=device,
    )
    specs = model.state_specs()
    return Chain(model, TritonAttention(shape), store, adapters, StateStore(rows, specs, device) if specs else None)


def fill_slots(adapting: Adapting, count: int, rank: int, device: torch.device) -> None:
    """Give all layers slots with random adapters, which change outputs by a small part."""
    slots = DeviceSlots(adapting.shapes, count, rank, torch.bfloat16, device)
    slots.ranks.fill_(slots.rank)
    for layer in slots.layers:
        layer.a.normal_(std=0.01)
        layer.b.normal_(std=0.01)
    adapting.attach(slots)


def blocks_of(step: Sequence[Part]) -> int:
    """Return the number of KV blocks, each row having as many as the longest."""
    return len(step) * -(-max(part.start + part.tokens for part in step) // BLOCK_SIZE)


def padding_of(step: Sequence[Part], chunks: bool) -> int:
    """Return the tokens of no row that the engine's graph would add to a step of rows of several tokens."""
    tokens, longest = sum(part.tokens for part in step), max(part.tokens for part in step)
    if longest == 1 or longest > MAX_QUERIES:
        return 0
    sizes = mixed_buckets(1024) if chunks else [*short_row_buckets(1024), *mixed_buckets(1024)]
    return min(size for size in sizes if size >= tokens) - tokens


def make_batch(step: Sequence[Part], chain: Chain, seed: int = 0, *, chunks: bool = False) -> ForwardBatch:
    """Build a batch of different tokens with blocks scattered over the store; a captured step's inputs are on the
    device.

    chunks: rows of several tokens are chunks of prompts, also if they are short.
    """
    device, generator = chain.model.device, torch.Generator().manual_seed(seed)
    counts = [part.tokens for part in step]
    contexts = [part.start + part.tokens for part in step]
    padding = padding_of(step, chunks)
    rows, decodes, tokens = len(step), counts.count(1), sum(counts) + padding
    tables = torch.randperm(chain.store.num_blocks, generator=generator)[: blocks_of(step)].view(rows, -1)
    positions = torch.cat([torch.arange(part.start, part.start + part.tokens) for part in step])
    row_of = torch.repeat_interleave(torch.arange(rows), torch.tensor(counts))
    slots = tables[row_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    positions, slots = F.pad(positions, (0, padding)), F.pad(slots, (0, padding), value=-1)
    batch = ForwardBatch(
        input_ids=torch.randint(chain.model.spec.vocab_size, (tokens,), generator=generator).to(device),
        positions=positions.to(device),
        query_start=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        context_len=torch.tensor(contexts, dtype=torch.int32).to(device),
        table_rows=torch.arange(rows, dtype=torch.int32, device=device),
        paging=(Paging(tables.int().to(device), slots.to(device)),),
        logits_at=torch.empty(0, dtype=torch.int64, device=device),
        query_lens=counts,
        context_lens=contexts,
        max_query=max(counts),
        num_decodes=decodes,
        states=_states(step, chain),
        adapters=_adapter_rows(row_of, padding, chain.adapters, device),
    )
    if decodes == rows:
        return batch
    short = chain.attention.short_rows(tokens)
    if short is not None and rows <= short.rows and max(counts) <= short.tokens and not chunks:
        return replace(batch, max_query=short.tokens, num_decodes=0)
    chunk_map = chain.attention.map_chunks(tokens, decodes, counts[decodes:], contexts[decodes:])
    lengths = torch.tensor(contexts[:decodes] + [0] * (rows - decodes), dtype=torch.int32).to(device)
    ones = [1] * rows
    return replace(
        batch,
        query_lens=ones,
        context_lens=ones,
        num_decodes=rows,
        decode_len=lengths,
        chunk_map=torch.from_numpy(chunk_map).to(device),
        divided=chain.attention.is_divided(chunk_map),
    )


def _states(step: Sequence[Part], chain: Chain) -> StateBatch | None:
    if chain.states is None:
        return None
    return StateBatch.of(chain.states, [StateRow(slot, *part) for slot, part in enumerate(step)])


def _adapter_rows(row_of: torch.Tensor, padding: int, adapters: int, device: torch.device) -> AdapterRows | None:
    """Return the adapters of tokens, whose rows use them in turn. row_of: [T], each token's row."""
    if not adapters:
        return None
    return AdapterRows([], F.pad(row_of % adapters, (0, padding), value=-1).int().to(device))


def capture(chain: Chain, batch: ForwardBatch) -> torch.cuda.CUDAGraph:
    chain.forward(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.forward(batch)
    return graph


def timed_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return the median time of one replay."""
    samples = []
    for _ in range(SAMPLES):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # gives the host a head start
        first.record()
        for _ in range(REPLAYS):
            graph.replay()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) * 1000 / REPLAYS)
    return median(samples)


def profiled_us(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float]]:
    """Return the kernels of one replay, longest first. A kernel that starts early counts from then, waiting
    included.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sums: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            sums[event["name"][:60]] += event["dur"] / REPLAYS
    return sorted(sums.items(), key=lambda item: -item[1])


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="of the GPU table, in bfloat16, FP8 by blocks or int4")
    parser.add_argument("--steps", nargs="+", default=STEPS, help=f"default: {' '.join(STEPS)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chunks", action="store_true", help="compute rows of several tokens as prompts")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters that rows use in turn")
    parser.add_argument("--rank", type=int, default=16, help="of each adapter")
    parser.add_argument("--profile", action="store_true", help="show each step's kernels")
    args = parser.parse_args(arguments)
    steps = {text: read_step(text) for text in args.steps}
    print({**gpu(), **host(), **torch_versions()})
    tokens = max(sum(part.tokens for part in step) + padding_of(step, args.chunks) for step in steps.values())
    chain = make_chain(
        args.model,
        args.layers,
        max(blocks_of(step) for step in steps.values()),
        tokens,
        max(len(step) for step in steps.values()),
        torch.device("cuda"),
        args.adapters,
        args.rank,
    )
    batches = {
        text: make_batch(step, chain, random.Random(text).getrandbits(31), chunks=args.chunks)
        for text, step in steps.items()
    }
    with compiling():
        for batch in batches.values():
            chain.forward(batch)
    for text, batch in batches.items():
        graph = capture(chain, batch)
        print(f"{text:>16}: {timed_us(graph) / args.layers:8.1f} us a layer", flush=True)
        for name, us in profiled_us(graph) if args.profile else ():
            print(f"{us / args.layers:26.1f} {name}")


if __name__ == "__main__":
    main()
