"""Forward pass of encoders, compared with what the card allows.

    python -m benchmarks.encoders [--models minilm bge-large modernbert embeddinggemma] [--step-tokens 8192]
        [--tokens 128 512] [--dtype bfloat16] [--repeats 20]

Models have the published shapes and dummy weights. A step has as many texts of equal length as fit. Prints texts per
second of steps one after the other, and of the device alone: the time of its kernels, by PyTorch's profiler. If the
first is much lower, the host launches kernels more slowly than the device computes them. The bound is the arithmetic
of the matrix products and of two-sided attention, local where it is, at 711 TFLOP/s (see benchmarks/bounds.py).
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.bounds import CARD
from roseinfer.bench.report import header, table
from roseinfer.core.config.engine import ModelConfig
from roseinfer.models.encoders.base import EncoderModel, PackedRows
from roseinfer.models.encoders.loader import load_encoder
from roseinfer.models.encoders.registry import read_encoder_spec
from roseinfer.models.encoders.spec import EncoderSpec

_BERT: dict[str, Any] = {"architectures": ["BertModel"], "vocab_size": 30522, "max_position_embeddings": 512}


def _sizes(layers: int, hidden: int, intermediate: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


MODELS: dict[str, dict[str, Any]] = {
    "minilm": {**_BERT, **_sizes(6, 384, 1536, 12)},
    "bge-base": {**_BERT, **_sizes(12, 768, 3072, 12)},
    "bge-large": {**_BERT, **_sizes(24, 1024, 4096, 16)},
    "modernbert": {"architectures": ["ModernBertModel"], "vocab_size": 50368, **_sizes(22, 768, 1152, 12)},
    "embeddinggemma": {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "vocab_size": 262144,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "max_position_embeddings": 2048,
        **_sizes(24, 768, 1152, 3),
    },
}


def flops_of(spec: EncoderSpec, tokens: int) -> float:
    """Return the arithmetic of one text."""
    kv_heads = getattr(spec, "kv_heads", spec.num_heads)
    matrices = 3 if hasattr(spec, "local") else 2  # a gate more
    weights = spec.hidden_size * (2 * (spec.num_heads + kv_heads) * spec.head_dim + matrices * spec.intermediate_size)
    local = getattr(spec, "local", (False,) * spec.num_layers)
    seen = sum(min(tokens, 2 * getattr(spec, "reach", tokens) + 1) if near else tokens for near in local)
    return 2.0 * tokens * weights * spec.num_layers + 4.0 * tokens * seen * spec.num_heads * spec.head_dim


@torch.inference_mode()
def seconds_of(encoder: EncoderModel, rows: PackedRows, repeats: int) -> tuple[float, float]:
    """Return the time of a step, and the time of its kernels; 0 without a GPU."""
    for _ in range(3):
        encoder.forward(rows)
    cuda = encoder.device.type == "cuda"
    found = []
    for _ in range(5):
        _wait(cuda)
        start_s = perf_counter()
        for _ in range(repeats):
            encoder.forward(rows)
        _wait(cuda)
        found.append((perf_counter() - start_s) / repeats)
    if not cuda:
        return statistics.median(found), 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        encoder.forward(rows)
        torch.cuda.synchronize()
    return statistics.median(found), sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def measure(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each length of texts."""
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(MODELS[name]))
        spec = read_encoder_spec(Path(made))
        options = ModelConfig(dtype=args.dtype, load_format="dummy", seed=args.seed)
        encoder = load_encoder(Path(made), spec, options, device)
    rows = []
    for tokens in args.tokens:
        texts = max(1, args.step_tokens // tokens)
        ids = torch.randint(5, 1000, (texts * tokens,), device=device)
        step_s, device_s = seconds_of(encoder, PackedRows.of(ids, [tokens] * texts), args.repeats)
        row = {"model": name, "tokens": tokens, "step ms": f"{step_s * 1e3:.2f}", "texts/s": f"{texts / step_s:,.0f}"}
        if device_s:
            share = flops_of(spec, tokens) * texts / device_s / CARD.matrix_flops_s
            row |= {"device ms": f"{device_s * 1e3:.2f}", "device texts/s": f"{texts / device_s:,.0f}"}
            row["device, of the bound"] = f"{share:.0%}"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="of each text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device(args.device)
    print(header("encoders", vars(args)))
    print(table([row for name in args.models for row in measure(name, args, device)]))


if __name__ == "__main__":
    main()
