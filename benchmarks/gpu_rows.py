"""Rows of the GPU table: workloads, vLLM 0.24.0's figures, and roseinfer's targets."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from roseinfer.bench.config import OpenLoopConfig

# Figure -> format. Higher is better for "tok/s", lower for milliseconds.
FIGURES = {
    "output_tok_s": "output tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "itl_p99_ms": "ITL p99 ms",
}
PEER = (
    "vLLM 0.24.0 (torch 2.11.0+cu130, FlashAttention 3) on one NVIDIA H200, 2026-11-20 (8 bits and shared prefixes: "
    "2026-11-22; two GPUs for models that end in tp2), one run of each row"
)
MEMORY_SHARE = "0.85"
INT4_BYTES = 17 / 32  # of a weight: groups of 128 have 64 bytes of codes, a scale and an offset
NVFP4_BYTES = 9 / 16  # of a weight: groups of 16 have 8 bytes of codes and a scale
MXFP4_BYTES = 17 / 32  # of a weight: blocks of 32 have 16 bytes of codes and a scale


@dataclass(frozen=True)
class Model:
    """Model of the table. `hub_id` names its packaged shape; `options` are further arguments of `roseinfer serve`.

    `fp8_blocks`: the weights are stored in FP8 with a scale per block of 128 x 128. `int4`: they are stored in four
    bits, as AWQ stores them, in groups of 128. `nvfp4`: they are stored so by compressed-tensors. `weight_bytes`: bytes
    of a weight in a layer; `head_bytes`: in the output head; `expert_bytes`: in an expert, None for the same as in a
    layer; `kv_bytes`: of an element of K and V. `gpus`: number of GPUs that share it.
    """

    name: str
    hub_id: str
    max_model_len: int
    options: str = ""
    fp8_blocks: bool = False
    weight_bytes: float = 2
    kv_bytes: int = 2
    gpus: int = 1
    expert_bytes: float | None = None
    int4: bool = False
    nvfp4: bool = False
    head_bytes: int = 2

    @property
    def folder(self) -> str:
        """Return the name of the folder with config and tokenizer; models that differ in options share one."""
        kinds = {"-fp8": self.fp8_blocks, "-int4": self.int4, "-nvfp4": self.nvfp4}
        return self.hub_id.rpartition("/")[2].lower() + next((kind for kind, stored in kinds.items() if stored), "")


@dataclass(frozen=True)
class Row:
    """Row of the table. `arguments` are the client's. `peer`, `target`: figure -> value; a target is to be reached.

    Some figures of the peer may be unknown. `paced`: arrivals set the output rate, which then says nothing about the
    server.
    """

    model: str
    name: str
    arguments: str
    peer: Mapping[str, float]
    target: Mapping[str, float]
    paced: bool = False

    @property
    def key(self) -> str:
        return f"{self.model} {self.name}"

    def load(self, seed_shift: int = 0) -> OpenLoopConfig:
        """Return the workload as our own client draws it; `seed_shift` is added to its seed."""
        types = {f.name: f.type for f in fields(OpenLoopConfig)}
        words, values = iter(shlex.split(self.arguments)), dict[str, Any]()
        for word in words:
            name = word.removeprefix("--").replace("-", "_")
            kind = types[name]
            values[name] = True if kind is bool else next(words)
            if kind in (int, float):
                values[name] = kind(values[name])
        values["seed"] = values.get("seed", 0) + seed_shift
        return OpenLoopConfig(**values)

    def flags(self, seed_shift: int = 0) -> list[str]:
        """Return the client's command-line arguments."""
        words = shlex.split(self.arguments)
        if "--seed" in words:
            at = words.index("--seed")
            del words[at : at + 2]
        return [*words, "--seed", str(self.load(seed_shift).seed)]


def _figures(rate: float, ttft: tuple[float, float], tpot: tuple[float, float], itl: float) -> dict[str, float]:
    return dict(zip(FIGURES, (rate, *ttft, *tpot, itl), strict=True))


# One request after another; models whose requests take longer than 2 s are sent fewer.
SLOW_SEQ1 = "--num 6 --procs 1 --workload uniform --rate 0.2 --in-len 128 --out-len 256"
SEQ1 = "--num 6 --procs 1 --workload uniform --rate 0.5 --in-len 128 --out-len 256"
NANO = "--num 256 --in-min 100 --in-len 1024 --out-min 100 --out-len 1024 --procs 8"
RAG = "--num 512 --in-len 1024 --out-len 128 --procs 8"
POISSON = "--num 400 --workload poisson --rate 20 --in-len 512 --out-len 128 --procs 8"

SHARED = "--num 512 --in-len 1024 --shared-prefix 896 --out-len 128 --procs 8"

_FP8_SEQ1 = _figures(138, (15.6, 16.7), (4.28, 4.28), 4.92)

TP2 = "--tensor-parallel-size 2"
_MODELS = (
    Model("gpt2", "gpt2", 1024),
    Model("qwen3-0.6b", "Qwen/Qwen3-0.6B", 4096),
    Model("qwen3-8b", "Qwen/Qwen3-8B", 4096),
    Model("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 4096),
    Model("qwen3-8b-fp8", "Qwen/Qwen3-8B", 4096, fp8_blocks=True, weight_bytes=1),
    Model(
        "qwen3-8b-fp8-head", "Qwen/Qwen3-8B", 4096, "--lm-head-dtype fp8", fp8_blocks=True, weight_bytes=1, head_bytes=1
    ),
    Model("qwen3-8b-int4", "Qwen/Qwen3-8B", 4096, int4=True, weight_bytes=INT4_BYTES),
    Model("qwen3-8b-nvfp4", "Qwen/Qwen3-8B", 4096, nvfp4=True, weight_bytes=NVFP4_BYTES),
    Model("qwen3-8b-fp8-kv", "Qwen/Qwen3-8B", 4096, "--quantization fp8 --kv-cache-dtype fp8", False, 1, 1),
    Model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 4096),
    Model("qwen3-30b-a3b-fp8", "Qwen/Qwen3-30B-A3B", 4096, fp8_blocks=True, weight_bytes=1),
    Model("qwen3-30b-a3b-int4", "Qwen/Qwen3-30B-A3B", 4096, int4=True, weight_bytes=INT4_BYTES),
    Model("gemma-3-27b", "google/gemma-3-27b-it", 4096),
    Model("qwen3.6-27b-fp8", "Qwen/Qwen3.6-27B", 4096, fp8_blocks=True, weight_bytes=1),
    Model("qwen3.6-35b-a3b-fp8", "Qwen/Qwen3.6-35B-A3B", 4096, fp8_blocks=True, weight_bytes=1),
    Model("gpt-oss-20b", "openai/gpt-oss-20b", 4096, expert_bytes=MXFP4_BYTES),
    Model("qwen3-8b-tp2", "Qwen/Qwen3-8B", 4096, TP2, gpus=2),
    Model("qwen3-32b-tp2", "Qwen/Qwen3-32B", 4096, TP2, gpus=2),
    Model("qwen3-32b-fp8-tp2", "Qwen/Qwen3-32B", 4096, TP2, fp8_blocks=True, weight_bytes=1, gpus=2),
)
MODELS = {model.name: model for model in _MODELS}

ROWS = (
    Row(
        "gpt2",
        "seq1",
        "--num 8 --procs 1 --workload uniform --rate 1.2 --in-len 128 --out-len 128",
        _figures(170, (11.3, 14.3), (1.46, 1.63), 2.50),
        {"tpot_p50_ms": 0.70},
        paced=True,
    ),
    Row(
        "gpt2",
        "hol",
        "--num 128 --cycle 512,1,1,1 --out-len 32",
        _figures(12_322, (129, 157), (6.21, 6.89), 27.8),
        {"output_tok_s": 22_000, "ttft_p50_ms": 75},
    ),
    Row(
        "gpt2",
        "burst65",
        "--num 512 --cycle 65 --out-len 2 --procs 8",
        _figures(1_357, (308, 741), (5.47, 35.6), 35.6),
        {"ttft_p50_ms": 120, "ttft_p99_ms": 290},
    ),
    Row(
        "gpt2",
        "same65",
        "--num 512 --cycle 65 --out-len 2 --procs 8 --same-prompt --seed 1",
        _figures(1_314, (380, 764), (0.00, 46.8), 47.1),
        {"ttft_p50_ms": 120, "ttft_p99_ms": 290},
    ),
    Row(
        "qwen3-0.6b",
        "seq1",
        SEQ1,
        _figures(147, (12.6, 14.2), (1.62, 1.65), 2.59),
        {"tpot_p50_ms": 0.85, "ttft_p50_ms": 7},
        paced=True,
    ),
    Row("qwen3-0.6b", "nano", NANO, _figures(22_966, (512, 713), (8.14, 11.3), 26.9), {"output_tok_s": 27_500}),
    Row("qwen3-0.6b", "rag", RAG, _figures(14_329, (1_238, 2_337), (24.8, 27.3), 68.1), {"output_tok_s": 16_000}),
    Row(
        "qwen3-0.6b",
        "poisson",
        POISSON,
        _figures(2_326, (23.3, 62.9), (2.25, 4.54), 20.4),
        {"tpot_p50_ms": 1.3, "ttft_p99_ms": 35},
        paced=True,
    ),
    Row("qwen3-8b", "seq1", SEQ1, _figures(136, (16.8, 20.7), (5.13, 5.13), 5.75), {"tpot_p50_ms": 4.4}, paced=True),
    Row(
        "qwen3-8b",
        "nano",
        NANO,
        _figures(9_578, (2_108, 3_618), (15.3, 35.3), 185),
        {"output_tok_s": 10_200, "itl_p99_ms": 60},
    ),
    Row("qwen3-8b", "rag", RAG, _figures(3_881, (6_765, 13_501), (76.7, 118), 417), {"output_tok_s": 4_050}),
    Row(
        "qwen3-8b",
        "poisson",
        POISSON,
        _figures(2_275, (52.4, 119), (8.09, 13.9), 40.2),
        {"ttft_p99_ms": 80, "itl_p99_ms": 20},
        paced=True,
    ),
    Row(
        "llama-3.1-8b",
        "shared",
        SHARED,
        {"output_tok_s": 11_900, "ttft_p50_ms": 1_317, "ttft_p99_ms": 2_084},
        {"output_tok_s": 12_800, "ttft_p99_ms": 2_100},
    ),
    Row(
        "qwen3-8b-fp8",
        "seq1",
        SEQ1,
        _FP8_SEQ1,
        {"tpot_p50_ms": 2.4},
        paced=True,
    ),
    # The peer's head is in 16 bits.
    Row(
        "qwen3-8b-fp8-head",
        "seq1",
        SEQ1,
        _FP8_SEQ1,
        {"tpot_p50_ms": 2.3},
        paced=True,
    ),
    Row("qwen3-8b-fp8", "nano", NANO, _figures(9_792, (1_600, 3_126), (15.3, 33.5), 140), {}),
    Row("qwen3-8b-fp8", "rag", RAG, _figures(4_706, (5_252, 10_724), (65.2, 94.4), 321), {}),
    Row(
        "qwen3-8b-fp8",
        "poisson",
        POISSON,
        _figures(2_269, (51.3, 142), (10.4, 13.4), 49.6),
        {"tpot_p50_ms": 4.0, "ttft_p99_ms": 40},
        paced=True,
    ),
    Row("qwen3-8b-fp8-kv", "seq1", SEQ1, _figures(140, (15.0, 24.2), (3.81, 3.82), 4.32), {}, paced=True),
    Row(
        "qwen3-8b-fp8-kv",
        "nano",
        NANO,
        _figures(11_528, (1_629, 2_562), (12.9, 30.9), 128),
        {"output_tok_s": 15_000},
    ),
    Row(
        "qwen3-8b-fp8-kv",
        "rag",
        RAG,
        _figures(4_874, (4_660, 9_188), (66.3, 89.2), 274),
        {"output_tok_s": 5_400, "ttft_p50_ms": 5_000},
    ),
    Row(
        "qwen3-30b-a3b", "seq1", SEQ1, _figures(138, (25.6, 26.1), (4.29, 4.30), 5.05), {"tpot_p50_ms": 2.5}, paced=True
    ),
    Row("qwen3-30b-a3b", "nano", NANO, _figures(5_685, (2_844, 3_860), (24.1, 32.3), 124), {"output_tok_s": 6_600}),
    Row("qwen3-30b-a3b", "rag", RAG, _figures(5_095, (4_600, 9_007), (59.5, 83.4), 268), {"output_tok_s": 6_200}),
    Row(
        "qwen3-30b-a3b",
        "poisson",
        POISSON,
        _figures(2_156, (116, 1_252), (27.8, 39.8), 72.8),
        {"tpot_p50_ms": 18, "ttft_p99_ms": 150},
        paced=True,
    ),
    Row(
        "qwen3-30b-a3b-fp8",
        "seq1",
        SEQ1,
        _figures(137, (15.9, 20.3), (4.56, 4.56), 5.14),
        {"tpot_p50_ms": 1.9},
        paced=True,
    ),
    Row(
        "qwen3-30b-a3b-fp8", "nano", NANO, _figures(10_602, (1_392, 2_442), (13.8, 21.2), 123), {"output_tok_s": 11_300}
    ),
    Row("qwen3-30b-a3b-fp8", "rag", RAG, _figures(5_816, (4_532, 8_668), (50.3, 75.3), 254), {"output_tok_s": 6_800}),
    Row(
        "qwen3-30b-a3b-fp8",
        "poisson",
        POISSON,
        _figures(2_258, (145, 296), (21.3, 36.0), 90.5),
        {"tpot_p50_ms": 8},
        paced=True,
    ),
    Row("gemma-3-27b", "seq1", SLOW_SEQ1, {}, {"tpot_p50_ms": 15.0}, paced=True),
    Row("gemma-3-27b", "nano", NANO, {}, {}),
    Row("gemma-3-27b", "rag", RAG, {}, {}),
    Row("gemma-3-27b", "poisson", POISSON, {}, {}, paced=True),
    Row("qwen3.6-27b-fp8", "seq1", SEQ1, {}, {"tpot_p50_ms": 7.5}, paced=True),
    Row("qwen3.6-27b-fp8", "nano", NANO, {}, {}),
    Row("qwen3.6-27b-fp8", "rag", RAG, {}, {}),
    Row("qwen3.6-27b-fp8", "poisson", POISSON, {}, {}, paced=True),
    Row("qwen3.6-35b-a3b-fp8", "seq1", SEQ1, {}, {"tpot_p50_ms": 1.5}, paced=True),
    Row("qwen3.6-35b-a3b-fp8", "nano", NANO, {}, {}),
    Row("qwen3.6-35b-a3b-fp8", "rag", RAG, {}, {}),
    Row("qwen3.6-35b-a3b-fp8", "poisson", POISSON, {}, {}, paced=True),
    Row("gpt-oss-20b", "seq1", SEQ1, {}, {"tpot_p50_ms": 1.4}, paced=True),
    Row("gpt-oss-20b", "nano", NANO, {}, {}),
    Row("gpt-oss-20b", "rag", RAG, {}, {}),
    Row("gpt-oss-20b", "poisson", POISSON, {}, {}, paced=True),
    Row(
        "qwen3-8b-tp2", "seq1", SEQ1, _figures(140, (15.2, 16.7), (3.69, 3.69), 4.36), {"tpot_p50_ms": 2.6}, paced=True
    ),
    Row("qwen3-8b-tp2", "nano", NANO, _figures(14_371, (1_310, 2_350), (11.0, 22.0), 116), {"output_tok_s": 16_000}),
    Row("qwen3-8b-tp2", "rag", RAG, _figures(5_715, (4_302, 8_489), (54.8, 79.6), 135), {"output_tok_s": 6_600}),
    Row(
        "qwen3-32b-tp2", "seq1", SEQ1, _figures(119, (33.7, 39.2), (11.1, 11.1), 11.9), {"tpot_p50_ms": 9.0}, paced=True
    ),
    Row(
        "qwen3-32b-tp2",
        "nano",
        NANO,
        _figures(4_965, (4_395, 8_554), (29.5, 71.0), 466),
        {"output_tok_s": 5_600, "itl_p99_ms": 120},
    ),
    Row("qwen3-32b-tp2", "rag", RAG, _figures(1_764, (15_982, 31_742), (162, 269), 493), {"output_tok_s": 1_950}),
    Row("qwen3-32b-fp8-tp2", "seq1", SEQ1, {}, {"tpot_p50_ms": 5.5}, paced=True),
)


def gain(figure: str, ours: float | None, other: float | None) -> float | None:
    """Return how many times better `ours` is than `other`; None if one is missing or 0."""
    if not ours or not other:
        return None
    return ours / other if figure == "output_tok_s" else other / ours


def reached(figure: str, ours: float | None, target: float) -> bool:
    """Return True if the target is reached; equality counts."""
    if ours is None:
        return False
    return ours >= target if figure == "output_tok_s" else ours <= target
