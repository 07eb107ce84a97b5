"""Collect facts about the machine and the installation. Failures are facts too; nothing here raises."""

import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import roseinfer
from roseinfer.cli.doctor.config import DoctorConfig
from roseinfer.cli.doctor.facts import Facts, Gpu, Model, Torch
from roseinfer.cli.doctor.hosts import find_hosts
from roseinfer.cli.doctor.requirements import declared
from roseinfer.core.memory import available_memory_bytes
from roseinfer.processes.launch import run_python

TORCH_TIMEOUT_S = 180.0  # the first kernel is compiled, and a driver may hang
NO_EXTRAS = ("dev",)  # for developers of roseinfer
_MAX_SOCKET_PATH_BYTES = 103  # limit of macOS; Linux allows four more
_LONGEST_SOCKET_NAME = "/roseinfer-12345678/engine999.new"


def collect_facts(config: DoctorConfig) -> Facts:
    """Collect all facts. Takes as long as importing PyTorch and compiling a kernel."""
    requirements = declared()
    return Facts(
        roseinfer=roseinfer.__version__,
        python=sys.version_info[:3],
        platform=platform.platform(terse=True),
        system=sys.platform,
        packages=requirements.pop("", ()),
        extras={name: packages for name, packages in requirements.items() if name not in NO_EXTRAS},
        torch=ask_torch(),
        gpu_files=any(Path("/dev").glob("nvidia[0-9]*")),
        cores=_cores(),
        cpu_quota=cpu_quota(Path("/sys/fs/cgroup/cpu.max")),
        memory_bytes=available_memory_bytes(),
        files=_files(),
        temporary=tempfile.gettempdir(),
        temporary_error=_temporary_error(),
        port=config.server_port,
        port_error=None if config.server_port is None else _port_error(config.server_port),
        model=None
        if config.model is None
        else read_model(config.model, config.gguf_file, revision=config.revision, download_dir=config.download_dir),
        hosts=find_hosts(config),
    )


def ask_torch(arguments: Sequence[str] = ("-m", "roseinfer.cli.doctor.device")) -> Torch:
    """Run `device` in a separate process: a broken driver may crash or hang it."""
    try:
        done = run_python(arguments, TORCH_TIMEOUT_S)
    except TimeoutError:
        return Torch(error=f"PyTorch did not respond within {TORCH_TIMEOUT_S:.0f} s; the driver may hang")
    except OSError as error:
        return Torch(error=f"cannot start a process: {error.strerror}")
    lines = done.stdout.splitlines()
    try:
        said = json.loads(lines[-1])
        said["gpus"] = tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in said["gpus"])
        return Torch(**said)
    except (IndexError, ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        how = f"ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        return Torch(error=f"PyTorch {how}: {last}")


def cpu_quota(path: Path) -> float | None:
    """Return the cores that cgroup v2 lets a container use; None = all."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or it contains "max"
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _files() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None, None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def _temporary_error() -> str | None:
    folder = tempfile.gettempdir()
    too_many = len(os.fsencode(folder + _LONGEST_SOCKET_NAME)) - _MAX_SOCKET_PATH_BYTES
    if too_many > 0:
        return f"{folder} is {too_many} bytes too long for a socket path"
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"x")
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror}"
    return None


def _port_error(port: int) -> str | None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None


def read_model(
    name: str, gguf_file: str | None = None, *, revision: str | None = None, download_dir: str | None = None
) -> Model:
    """Read the model's folder or GGUF file; nothing is downloaded."""
    from roseinfer.config.hub import cached_model, did_you_mean
    from roseinfer.core.errors import RoseinferError
    from roseinfer.models.config import read_model_spec
    from roseinfer.models.documents import weight_bytes
    from roseinfer.models.encoders.registry import is_encoder, read_encoder_spec
    from roseinfer.models.loaded_size import loaded_size
    from roseinfer.text.tokenizer import Tokenizer

    try:
        folder = cached_model(name, gguf_file, revision=revision, download_dir=download_dir)
        if folder is None:
            return Model(name, needs=f"not downloaded yet{did_you_mean(name)}")
        if is_encoder(folder):
            encoder = read_encoder_spec(folder)  # imports PyTorch
            architecture, context, scheme = encoder.architecture, encoder.max_length, None
        else:
            spec = read_model_spec(folder)
            architecture, context = spec.architecture, spec.max_position
            scheme = spec.quantization
        weights = weight_bytes(folder)
        if not weights:
            return Model(name, error=f"{folder} contains no safetensors weights")
        Tokenizer.from_folder(folder)
        loaded = loaded_size(folder, scheme)
    except (RoseinferError, OSError, ImportError) as error:
        return Model(name, error=str(error))
    quantised = None if scheme is None else scheme.label
    return Model(name, None, None, architecture, weights, context, quantised, loaded)
