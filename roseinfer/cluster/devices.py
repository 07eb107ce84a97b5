"""Which engine of several gets what of the machine: a GPU, or a share of the CPU's threads."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from roseinfer.core.config.engine import PRICED, EngineConfig, ProfileConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.core.json_file import parse_json, read_json
from roseinfer.core.memory import available_memory_bytes

CPU = "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Files of a machine that has GPUs: the driver's, that of Windows's Linux, that of AMD's.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# What a process holds before it has a model: 195 MB were measured with a tiny one on a CPU, 28 MB of a priced engine.
CPU_BYTES, PRICED_BYTES = 150e6, 25e6
# PyTorch has to be imported for the answer, which may take long on a slow disk.
ASK_S = 120.0
# Of a safetensors file, by its definition.
LONGEST_HEADER = 100_000_000
ASK = "import torch; n = torch.cuda.device_count(); print(*map(torch.cuda.get_device_name, range(n)), sep='\\n')"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One of several engines. `environment`: what its process finds beside ours. `kind`: of device; engines of the
    same kind take as long for a step.
    """

    config: EngineConfig
    environment: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""


def engine_specs(config: EngineConfig, replicas: ReplicasConfig) -> list[EngineSpec]:
    """What each engine is started with. May take seconds: a process looks for GPUs.

    A server of one engine that names no device is left as it is. Raises `ConfigError` if there are fewer GPUs than
    engines, or none with a number that was named.
    """
    count = replicas.count
    configs = [_own(config, index, count) for index in range(count)]
    if count == 1 and not replicas.device_list:
        return [EngineSpec(configs[0])]
    if config.model.device == PRICED and not replicas.device_list:
        return [EngineSpec(own, {}, f"{PRICED} {own.priced.slow}") for own in configs]
    gpus = _gpus(config.model.device, named=bool(replicas.device_list))
    if not gpus:
        if replicas.device_list:
            raise ConfigError(f"devices is {replicas.devices}, but no GPU is found")
        return _on_cpu(configs)
    chosen = _chosen(replicas, config.model.tensor_parallel_size)
    _check(chosen, len(gpus), replicas)
    names = _visible(os.environ, len(gpus))
    # Named, so that an engine whose GPU fails says so and does not come up on the CPU.
    return [
        EngineSpec(_with_model(own, device="cuda"), {VISIBLE: ",".join(names[gpu] for gpu in its)}, _kind(gpus, its))
        for own, its in zip(configs, chosen, strict=True)
    ]


def _chosen(replicas: ReplicasConfig, each: int) -> list[range] | list[list[int]]:
    """The numbers of each engine's GPUs, of which it takes so many."""
    if not replicas.device_list:
        return [range(engine * each, (engine + 1) * each) for engine in range(replicas.count)]
    chosen = [[int(gpu) for gpu in name.split("+")] for name in replicas.device_list]
    if any(len(its) != each for its in chosen):
        wanted = "1 GPU" if each == 1 else f"{each} GPUs, joined by +"
        raise ConfigError(f"devices is {replicas.devices}, but tensor_parallel_size gives each engine {wanted}")
    return chosen


def _kind(gpus: Sequence[str], its: Sequence[int]) -> str:
    """Of one GPU its name."""
    return gpus[its[0]] if len(its) == 1 else " + ".join(gpus[gpu] for gpu in its)


def _gpus(device: str, *, named: bool) -> list[str]:
    """The names of the GPUs that engines may get. Raises `ConfigError` if `device` asks for one and there is none."""
    if device not in ("auto", "cuda"):
        if named:
            raise ConfigError(f"devices names GPUs, but device is {device}")
        return []
    gpus = gpu_names() if device == "cuda" or named or any(map(os.path.exists, DRIVERS)) else []
    if device == "cuda" and not gpus:
        raise ConfigError("device is cuda, but PyTorch finds no CUDA GPU")
    return gpus


def gpu_names() -> list[str]:
    """The GPUs that PyTorch sees, as a process of its own says: this one shall neither load it nor touch a GPU."""
    try:
        asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"PyTorch does not find out within {ASK_S:g} s which GPUs there are") from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"it ended with code {asked.returncode}"])[-1]
        raise ResourceError(f"PyTorch cannot say which GPUs there are: {last[:300]}")
    return asked.stdout.split("\n")[:-1] if asked.stdout.strip() else []


def _check(chosen: Sequence[Sequence[int]], found: int, replicas: ReplicasConfig) -> None:
    there = "there is 1 GPU" if found == 1 else f"there are {found} GPUs"
    if max(map(max, chosen)) < found:
        return
    if replicas.device_list:
        raise ConfigError(f"devices is {replicas.devices}, but {there}, numbered from 0")
    each = len(chosen[0])
    takes = "one" if each == 1 else f"{each} (tensor_parallel_size)"
    raise ConfigError(f"replicas is {replicas.count}, but {there}, and each engine takes {takes}")


def _visible(environment: Mapping[str, str], found: int) -> list[str]:
    """What each GPU is called by: if somebody has chosen some for us, we choose among these."""
    outer = environment.get(VISIBLE)
    if outer is None:
        return [str(number) for number in range(found)]
    return [name.strip() for name in outer.split(",")][:found]


def _on_cpu(configs: Sequence[EngineConfig]) -> list[EngineSpec]:
    """Each process has as many threads as it was told to, or its part of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    part = max(1, cores // sum(config.model.tensor_parallel_size for config in configs))
    return [
        EngineSpec(own if own.model.threads is not None else _with_model(own, threads=part), {}, CPU) for own in configs
    ]


def for_restart(config: EngineConfig, number: int) -> EngineConfig:
    """For an engine's process of that number: what an earlier one recorded is not written over."""
    if number == 1:
        return config
    return replace(config, profile=_own_files(config.profile, number))


def check_memory(specs: Sequence[EngineSpec], folder: Path) -> None:
    """Raises `ConfigError` if the machine lacks memory for several engines: for what those on GPUs keep in it, and for
    all of the others.

    What is counted is what each holds in any case. It takes more than that, so what passes may still fail.
    """
    config = specs[0].config
    if len(specs) == 1:
        return
    on_gpus = config.model.device != PRICED and specs[0].kind != CPU
    each = (0.0 if on_gpus else _least_bytes(config, folder)) + _host_cache_bytes(config)
    available = available_memory_bytes()
    if each and len(specs) * each > available:
        raise ConfigError(
            f"replicas is {len(specs)}, but each engine takes {each / 1e9:.3g} GB of memory at least, "
            f"and {available / 1e9:.3g} GB are available"
        )


def _host_cache_bytes(config: EngineConfig) -> float:
    return 0.0 if config.model.device == PRICED else config.cache.kv_offloading_size * 2**30


def _least_bytes(config: EngineConfig, folder: Path) -> float:
    if config.model.device == PRICED:
        return PRICED_BYTES
    processes = config.model.tensor_parallel_size * (CPU_BYTES + (config.cache.kv_cache_memory_bytes or 0))
    if config.model.load_format == "dummy":  # nobody knows the weights yet
        return processes
    computed = 4 if config.model.dtype in ("auto", "float32") else 2
    return processes + computed * sum(map(_numbers_in, _weight_files(folder)))


def _weight_files(folder: Path) -> list[Path]:
    """Those that are loaded; a folder may have the same weights in others too."""
    try:
        index = read_json(folder / "model.safetensors.index.json")
        return [folder / name for name in set(index["weight_map"].values())]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return [folder / "model.safetensors"]


def _numbers_in(file: Path) -> float:
    """Weights that a safetensors file holds: by its header, for config.json may say another dtype."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            tensors = parse_json(opened.read(min(size, LONGEST_HEADER)))
        tensors.pop("__metadata__", None)
        return sum(prod(tensor["shape"]) for tensor in tensors.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return 0  # what is wrong with it the engine says


def _own(config: EngineConfig, index: int, count: int) -> EngineConfig:
    """With its own speed, if it is priced, and files of its own for what it records."""
    profile = _own_files(config.profile, index) if count > 1 else config.profile
    return replace(config.for_engine(index, count), profile=profile)


def _own_files(profile: ProfileConfig, index: int) -> ProfileConfig:
    return replace(
        profile,
        profile=None if profile.profile is None else str(Path(profile.profile, str(index))),
        record=None if profile.record is None else f"{profile.record}.{index}",
    )


def _with_model(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, model=replace(config.model, **changes))
