"""Devices of engines: each gets GPUs of its own, or a share of the CPU's cores."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roseinfer.core.config.engine import PRICED, EngineConfig, ProfileConfig
from roseinfer.core.config.replicas import ReplicasConfig, on_one_gpu
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.core.memory import available_memory_bytes
from roseinfer.core.recorder import file_after_restart
from roseinfer.core.stored_weights import stored_weights
from roseinfer.processes.launch import describe_exit, run_python

logger = logging.getLogger(__name__)

CPU = "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Files of machines with GPUs: of NVIDIA's driver, of Linux in Windows, of AMD's driver.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Least memory of a process without a model; 195 MB were measured on a CPU, 28 MB of a priced engine.
MIN_CPU_ENGINE_BYTES, MIN_PRICED_ENGINE_BYTES = 150e6, 25e6
# The import of PyTorch may take long on a slow disk.
GPU_NAMES_TIMEOUT_S = 120.0
LIST_GPUS = "import torch; n = torch.cuda.device_count(); print(*map(torch.cuda.get_device_name, range(n)), sep='\\n')"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Configuration and devices of one engine.

    `environment`: additions to ours. `kind`: name of its devices; engines of one kind take equally long for a step.
    """

    config: EngineConfig
    environment: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""


def engine_specs(config: EngineConfig, replicas: ReplicasConfig) -> list[EngineSpec]:
    """Return what each engine is launched with. May take seconds: a child process lists the GPUs.

    The configuration of a server's only engine without `devices` stays unchanged. Raises `ConfigError` if there are too
    few GPUs, or none with a number in `devices`.
    """
    count = replicas.count
    configs = [_own(config, index, count) for index in range(count)]
    if count == 1 and not config.other_engines and not replicas.device_list:
        return [EngineSpec(configs[0])]
    if config.model.device == PRICED and not replicas.device_list:
        return [EngineSpec(own, {}, f"{PRICED} {own.priced.slow}") for own in configs]
    gpus = _gpus(config.model.device, named=bool(replicas.device_list))
    if not gpus:
        if replicas.device_list:
            raise ConfigError(f"devices={replicas.devices}: PyTorch finds no GPU")
        return _on_cpu(configs)
    chosen = _chosen(replicas, config.model.tensor_parallel_size)
    _check(chosen, len(gpus), replicas)
    names = _visible(os.environ, len(gpus))
    return [_on_gpus(own, its, gpus, names) for own, its in zip(configs, chosen, strict=True)]


def _on_gpus(config: EngineConfig, its: Sequence[int], gpus: Sequence[str], names: Sequence[str]) -> EngineSpec:
    """Return how to launch an engine on `its` GPUs. `names`: in CUDA_VISIBLE_DEVICES."""
    # With device=cuda an engine whose GPU fails reports that, instead of starting on the CPU.
    config = _with_model(config, device="cuda")
    if on_one_gpu(its):
        logger.warning("devices: %d processes of an engine take turns on GPU %d: for testing only", len(its), its[0])
        config = replace(config, ranks_on_one_gpu=True)
    visible = ",".join(names[gpu] for gpu in dict.fromkeys(its))
    return EngineSpec(config, {VISIBLE: visible}, _kind(gpus, its))


def _chosen(replicas: ReplicasConfig, each: int) -> list[range] | list[list[int]]:
    """Return the numbers of each engine's GPUs, `each` per engine."""
    if not replicas.device_list:
        return [range(engine * each, (engine + 1) * each) for engine in range(replicas.count)]
    chosen = replicas.gpu_lists
    if any(len(its) != each for its in chosen):
        wanted = "1 GPU" if each == 1 else f"{each} GPUs, joined by +"
        raise ConfigError(f"devices={replicas.devices}: tensor_parallel_size gives each engine {wanted}")
    return chosen


def _kind(gpus: Sequence[str], its: Sequence[int]) -> str:
    if on_one_gpu(its):
        return f"{gpus[its[0]]} for {len(its)}"
    return " + ".join(gpus[gpu] for gpu in its)


def _gpus(device: str, *, named: bool) -> list[str]:
    """Return the names of the GPUs that engines may use. Raises `ConfigError` if `device` requires one."""
    if device not in ("auto", "cuda"):
        if named:
            raise ConfigError(f"--devices requires --device cuda or auto, not {device!r}")
        return []
    gpus = gpu_names() if device == "cuda" or named or any(map(os.path.exists, DRIVERS)) else []
    if device == "cuda" and not gpus:
        raise ConfigError("device=cuda: PyTorch finds no CUDA GPU")
    return gpus


def gpu_names() -> list[str]:
    """Return the names of PyTorch's GPUs, from a child process: this one must neither load it nor touch a GPU."""
    try:
        done = run_python(["-c", LIST_GPUS], GPU_NAMES_TIMEOUT_S)
    except TimeoutError:
        raise ResourceError(f"PyTorch did not list the GPUs within {GPU_NAMES_TIMEOUT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [describe_exit(done.returncode)])[-1]
        raise ResourceError(f"PyTorch cannot list the GPUs: {last[:300]}")
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def _check(chosen: Sequence[Sequence[int]], found: int, replicas: ReplicasConfig) -> None:
    there = "there is 1 GPU" if found == 1 else f"there are {found} GPUs"
    if max(map(max, chosen)) < found:
        return
    if replicas.device_list:
        raise ConfigError(f"devices={replicas.devices}: {there}, numbered from 0")
    each = len(chosen[0])
    needs = "one" if each == 1 else f"{each} (tensor_parallel_size)"
    raise ConfigError(f"replicas={replicas.count}: {there}, and each engine needs {needs}")


def _visible(environment: Mapping[str, str], found: int) -> list[str]:
    """Return what each GPU is called in CUDA_VISIBLE_DEVICES: a choice made for this process restricts ours."""
    outer = environment.get(VISIBLE)
    if outer is None:
        return [str(number) for number in range(found)]
    return [name.strip() for name in outer.split(",")][:found]


def _on_cpu(configs: Sequence[EngineConfig]) -> list[EngineSpec]:
    """Give each process its share of the cores, unless `threads` is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = sum(config.model.tensor_parallel_size for config in configs) + configs[0].other_engines
    part = max(1, cores // processes)
    return [
        EngineSpec(own if own.model.threads is not None else _with_model(own, threads=part), {}, CPU) for own in configs
    ]


def for_restart(config: EngineConfig, number: int) -> EngineConfig:
    """Return the configuration of an engine's process `number`, whose records must not overwrite earlier ones. It goes
    without those that cannot be written.
    """
    if number == 1:
        return config
    profile = _own_files(config.profile, number)
    record, folder = file_after_restart(profile.record), _folder_after_restart(profile.profile)
    return replace(config, profile=replace(profile, record=record, profile=folder))


def _folder_after_restart(path: str | None) -> str | None:
    if path is not None:
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.error("profile: cannot make %s: %s; the engine restarts without traces", path, error.strerror)
            return None
    return path


def check_memory(specs: Sequence[EngineSpec], folder: Path) -> None:
    """Raise `ConfigError` if the machine lacks memory for several engines.

    Engines on GPUs count with their host cache, others with everything. This is a lower bound: a configuration that
    passes may still fail.
    """
    config = specs[0].config
    if len(specs) == 1:
        return
    on_gpus = config.model.device != PRICED and specs[0].kind != CPU
    each = (0.0 if on_gpus else _min_bytes(config, folder)) + _host_cache_bytes(config)
    available = available_memory_bytes()
    if each and len(specs) * each > available:
        raise ConfigError(
            f"replicas={len(specs)}: each engine needs at least {each / 1e9:.3g} GB of memory, "
            f"but only {available / 1e9:.3g} GB are available"
        )


def _host_cache_bytes(config: EngineConfig) -> float:
    return 0.0 if config.model.device == PRICED else config.cache.kv_offloading_size * 2**30


def _min_bytes(config: EngineConfig, folder: Path) -> float:
    if config.model.device == PRICED:
        return MIN_PRICED_ENGINE_BYTES
    processes = config.model.tensor_parallel_size * (MIN_CPU_ENGINE_BYTES + (config.cache.kv_cache_memory_bytes or 0))
    if config.model.load_format == "dummy":  # there are no weights to count
        return processes
    stored, asked = stored_weights(folder), config.model.quantization
    if asked == "int8" or (asked is None and stored.four_bits):
        return processes + stored.count
    computed = 4 if config.model.dtype in ("auto", "float32") else 2
    return processes + computed * stored.count


def _own(config: EngineConfig, index: int, count: int) -> EngineConfig:
    """Return an engine's configuration: its own speed if it is priced, and its own files for records."""
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
