"""Text and JSON of a breakdown."""

from dataclasses import asdict
from typing import Any

from benchmarks.breakdown.measure import Breakdown
from roseinfer.bench.report import table
from roseinfer.engine.api import EngineInfo

KERNELS_SHOWN = 12
NAME_WIDTH = 90


def start_as_text(info: EngineInfo) -> str:
    """Return how long the engine's start took, and its sizes."""
    seconds = [f"{phase} {seconds:.1f}" for phase, seconds in info.facts.startup_s.items()]
    return (
        f"  started, seconds: {', '.join(seconds)}\n"
        f"  weights {info.facts.weights}, K/V {info.kv_cache}, "
        f"{info.facts.num_blocks} blocks of {info.facts.block_size} tokens"
    )


def as_text(found: Breakdown) -> str:
    step_ms = 1e3 * found.step_s
    load = found.load
    rates = [f"{load.batch_size / found.step_s:.0f} tok/s"] if load.batch_size else []
    rates += [f"{load.prompt_tokens / found.step_s:.0f} prompt tok/s"] if load.prompt_tokens else []
    lines = [
        f"{load.name}, context {found.context:.0f}: {step_ms:.3f} ms a step, {', '.join(rates)}",
        _reached(found),
        _rates(found),
        "",
        _parts("host", found.host, found.step_s),
        "",
        _parts("kernels by kind", _found_kinds(found), found.step_s),
        "",
        table(
            [
                {"us": 1e6 * kernel.seconds, "calls": kernel.calls, "longest": kernel.name[:NAME_WIDTH]}
                for kernel in found.kernels[:KERNELS_SHOWN]
            ]
        ),
    ]
    return "\n".join(lines)


def as_json(found: Breakdown) -> dict[str, Any]:
    shares = {"bandwidth_share": found.bandwidth_share, "matrix_share": found.matrix_share}
    return {**asdict(found), "device_s": found.device_s, **shares}


def _reached(found: Breakdown) -> str:
    work, limits = found.work, found.limits
    weights, kv = 1e-9 * work.weight_bytes, 1e-9 * work.kv_bytes
    experts = f" ({1e-9 * work.expert_bytes:.3f} of experts)" if work.expert_bytes else ""
    return (
        f"weights {weights:.3f} GB{experts} + K/V {kv:.3f} GB a step: {work.bytes / found.step_s / 1e9:.0f} GB/s, "
        f"{found.bandwidth_share:.0%} of {limits.bytes_s / 1e9:.0f}; "
        f"{work.flops / found.step_s / 1e12:.3g} TFLOP/s, {found.matrix_share:.0%} of {limits.flops_s / 1e12:.3g}"
    )


def _rates(found: Breakdown) -> str:
    """Return the rates of the kinds of kernel that read and compute most, while they run."""
    work, rates = found.work, []
    own = 1.0 if found.device["experts"] else 0.0  # 1 if experts have their own kernels
    for kind, what, size, flops in (
        ("GEMM", "weights", work.weight_bytes - own * work.expert_bytes, work.linear_flops - own * work.expert_flops),
        ("experts", "weights", work.expert_bytes, work.expert_flops),
        ("attention", "K/V", work.kv_bytes, work.attention_flops),
    ):
        seconds = found.device[kind]
        if seconds and size:
            rate = f"{size / seconds / 1e9:.0f} GB/s, {flops / seconds / 1e12:.3g} TFLOP/s"
            rates.append(f"{kind} reads {what} at {rate}")
    return "; ".join(rates)


def _found_kinds(found: Breakdown) -> dict[str, float]:
    return {kind: seconds for kind, seconds in found.device.items() if seconds} | {"sum": found.device_s}


def _parts(title: str, parts: dict[str, float], whole: float) -> str:
    return table(
        [{title: name, "us": 1e6 * seconds, "% of step": 100 * seconds / whole} for name, seconds in parts.items()]
    )
