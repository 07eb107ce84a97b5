"""`bench latency --breakdown`: the engine, the device's limits, and a breakdown of each batch size."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from roseinfer.bench.breakdown import Breakdown, HostClock, Load, measure
from roseinfer.bench.config import LatencyConfig
from roseinfer.bench.cost import ModelCost
from roseinfer.bench.limits import measure_limits
from roseinfer.core.config import ModelConfig
from roseinfer.core.errors import ConfigError
from roseinfer.engine.llm import LLM
from roseinfer.hub import model_folder
from roseinfer.models.config import read_model_spec


def break_down(
    bench: LatencyConfig, model: ModelConfig, batch_sizes: Sequence[int], options: dict[str, Any]
) -> Iterator[Breakdown]:
    """`options` are those of the engine. The limits are measured before the engine takes the memory.

    Raises what `LLM` raises, `UnsteadyError`, and `ConfigError` for options that it cannot follow.
    """
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    device = torch.device("cuda" if torch.cuda.is_available() and model.device != "cpu" else "cpu")
    if device.type == "cpu" and options.get("overlap"):
        raise ConfigError("overlap: on a CPU steps then run in a thread of their own, where breakdown cannot follow")
    bytes_s = bench.peak_bandwidth and 1e9 * bench.peak_bandwidth
    flops_s = bench.peak_tflops and 1e12 * bench.peak_tflops
    limits = measure_limits(device, bytes_s, flops_s)
    clock = HostClock()
    with LLM(observer=clock, **options) as llm:
        itemsize = getattr(torch, llm.info.dtype).itemsize
        cost = ModelCost.of(read_model_spec(model_folder(model), model.max_model_len), itemsize)
        for number, size in enumerate(batch_sizes):
            load = Load(size, bench.input_len, bench.breakdown_steps, model.seed + number)
            yield measure(llm, clock, load, cost, limits)
