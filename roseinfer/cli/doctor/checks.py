"""Turn facts about a machine into checks: one line each, with advice where something is wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from roseinfer.cli.doctor.facts import Facts, Gpu, Hosts, Model, Package, Peer, RayCluster, Torch
from roseinfer.core.extras import install_command
from roseinfer.core.support import (
    FP8_WEIGHTS,
    MIN_FASTER_FP8_ROWS,
    SUPPORT_PAGE,
    generation_of,
    missing_features,
    system_error,
)

GB = 2**30
MIN_PYTHON = (3, 11)
# Memory for the smallest model, and memory for a useful one.
LEAST_BYTES, ENOUGH_BYTES = GB, 4 * GB
# Open files that a start needs, and those that the default of --max-num-queued-reqs adds.
MIN_FILES, ENOUGH_FILES = 128, 1024 + 128
# Larger weights leave little memory for the KV cache.
_WEIGHTS_SHARE = 0.8
# Sizes in files and in memory that differ by less are the same but for headers.
_SHOWN_SHARE = 0.01
# A certificate that expires sooner should be renewed.
MIN_VALID_DAYS = 14


class CheckState(StrEnum):
    OK = "ok"
    WARNING = "warning"  # serving works, but with limits
    PROBLEM = "problem"  # serving does not work


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `found` is the state, `advice` what to do about it."""

    name: str
    state: CheckState
    found: str
    advice: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, found: str) -> Check:
    return Check(name, CheckState.OK, found)


def warning(name: str, found: str, advice: str) -> Check:
    return Check(name, CheckState.WARNING, found, advice)


def problem(name: str, found: str, advice: str) -> Check:
    return Check(name, CheckState.PROBLEM, found, advice)


def judge(facts: Facts) -> list[Check]:
    """Return all checks in display order."""
    checks = [*_system(facts), _python(facts), *_packages(facts), _torch(facts.torch)]
    if facts.torch.error is None:
        checks += [_device(facts), *_cpu_functions(facts.torch), *_generation(facts.torch), *_kernels(facts)]
    checks += [_cores(facts), _memory(facts), _files(facts), _temporary(facts), *_port(facts), *_extras(facts)]
    if facts.model is not None:
        checks.append(_model(facts.model, facts))
    if facts.hosts is not None:
        checks += _hosts(facts.hosts)
    return checks


def _system(facts: Facts) -> Iterator[Check]:
    error = system_error(facts.system)
    if error is not None:
        found, _, advice = error.partition(": ")
        yield problem("system", found, advice)


def _python(facts: Facts) -> Check:
    found = f"{'.'.join(map(str, facts.python))} on {facts.platform}, roseinfer {facts.roseinfer}"
    if facts.python < MIN_PYTHON:
        return problem("Python", found, "install Python 3.11 or newer")
    return ok("Python", found)


def _packages(facts: Facts) -> Iterator[Check]:
    """Return one check if all packages fit, else one per package that does not."""
    wrong = [package for package in facts.packages if package.found is None or package.why_not is not None]
    for package in wrong:
        yield _wrong_package(package)
    if not wrong:
        yield ok("packages", f"all {len(facts.packages)} of the base install")


def _wrong_package(package: Package) -> Check:
    install = f"pip install '{package.wanted}'"
    if package.found is None:
        return problem("packages", f"{package.name} is not installed", install)
    return warning("packages", f"{package.name} {package.found} {package.why_not}", install)


def _torch(torch: Torch) -> Check:
    if torch.error is not None:
        return problem("PyTorch", torch.error, "reinstall it: https://pytorch.org/get-started/locally")
    build = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
    return ok("PyTorch", f"{torch.version}, {build}")


def _device(facts: Facts) -> Check:
    torch = facts.torch
    if torch.gpus:
        shown = [
            f"{gpu.name}, {gpu.free_bytes / GB:.1f} of {gpu.total_bytes / GB:.1f} GiB free, "
            f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
            for gpu in torch.gpus
        ]
        found = "; ".join(shown) + (f"; driver for CUDA {torch.driver}" if torch.driver else "")
        return problem("device", f"{found}: {torch.gpu_error}", _GPU_ADVICE) if torch.gpu_error else ok("device", found)
    cpu = f"CPU, {torch.threads} threads, {torch.cpu_gflops:.0f} GFLOP/s in float32"
    if facts.gpu_files and torch.cuda is None:
        advice = f"install its CUDA build: pip uninstall -y torch && {install_command('cuda')}"
        return warning("device", f"{cpu}; this PyTorch cannot use the NVIDIA GPU", advice)
    if facts.gpu_files:
        reason = torch.gpu_error or "PyTorch does not find it"
        return warning("device", f"{cpu}; there is an NVIDIA GPU, but {reason}", _GPU_ADVICE)
    return ok("device", f"{cpu}; no GPU")


def _cpu_functions(torch: Torch) -> Iterator[Check]:
    """Return a check of the compiled functions, which only CPUs use."""
    if not torch.gpus:
        found = f"with {torch.cpu_functions}" if torch.cpu_functions else "none; int8 and few streams are slower"
        yield ok("CPU functions", found)


def _generation(torch: Torch) -> Iterator[Check]:
    """Return a check for each compute capability of the GPUs: whether it was tested, and what it lacks."""
    if torch.gpu_error:
        return
    for capability in sorted({gpu.capability for gpu in torch.gpus}):
        generation = generation_of(capability)
        name = f"compute capability {capability[0]}.{capability[1]}" + (f" ({generation.name})" if generation else "")
        missing = missing_features(capability)
        found = name + (f", without: {'; '.join(missing)}" if missing else "")
        if generation is not None and generation.tested:
            yield ok("GPU support", f"{found}: tested on {generation.tested}")
        else:
            yield warning("GPU support", f"{found}: not tested", f"{SUPPORT_PAGE} has the table of GPUs")


_GPU_ADVICE = "check that nvidia-smi works and that the driver supports this PyTorch"


def _kernels(facts: Facts) -> Iterator[Check]:
    torch = facts.torch
    if not torch.gpus or torch.gpu_error:
        return
    if torch.triton is None:
        yield warning(
            "kernels", "Triton is not installed: no custom kernels and no CUDA graphs", install_command("cuda")
        )
        return
    if torch.kernel_error is not None:
        advice = "Triton requires a C compiler (gcc) and a writable cache folder (~/.triton)"
        yield problem(
            "kernels", f"Triton {torch.triton} cannot compile or run our kernels: {torch.kernel_error}", advice
        )
        return
    yield ok("kernels", f"Triton {torch.triton} compiles and runs our kernels")


def _cores(facts: Facts) -> Check:
    usable = facts.cores if facts.cpu_quota is None else min(facts.cores, facts.cpu_quota)
    found = f"{facts.cores} cores" + ("" if facts.cpu_quota is None else f", limited to {facts.cpu_quota:g} by a quota")
    if usable < 2:
        return warning("cores", found, "server and engine share one core: provide two or more")
    if facts.cpu_quota is not None and facts.cpu_quota < facts.cores and not facts.torch.gpus:
        return warning("cores", found, f"--threads {max(1, int(facts.cpu_quota))} keeps the engine within the quota")
    return ok("cores", found)


def _memory(facts: Facts) -> Check:
    found = f"{facts.memory_bytes / GB:.1f} GiB available"
    if facts.memory_bytes < LEAST_BYTES:
        return problem("memory", found, "the smallest model requires 1 GiB")
    if facts.memory_bytes < ENOUGH_BYTES:
        return warning("memory", found, "enough for small models only")
    return ok("memory", found)


def _files(facts: Facts) -> Check:
    """Check the hard limit on open files: the server raises its soft limit itself."""
    soft, hard = facts.files
    if hard is None:
        return ok("open files", "no limit")
    found = f"at most {hard}" if soft == hard else f"{soft}, which the server raises to {min(hard, 65536)}"
    if hard < MIN_FILES:
        return problem("open files", found, f"raise ulimit -n to at least {MIN_FILES}")
    if hard < ENOUGH_FILES:
        return warning("open files", found, f"raise ulimit -n to {ENOUGH_FILES} for the default limits")
    return ok("open files", found)


def _temporary(facts: Facts) -> Check:
    if facts.temporary_error is not None:
        return problem("temporary files", facts.temporary_error, "set TMPDIR to a short, writable path")
    return ok("temporary files", f"in {facts.temporary}")


def _port(facts: Facts) -> Iterator[Check]:
    if facts.port_error is not None:
        advice = "stop the process that listens there, or choose another port with --port"
        yield problem("port", f"{facts.port} cannot be used: {facts.port_error}", advice)
    elif facts.port is not None:
        yield ok("port", f"{facts.port} is free")


def _extras(facts: Facts) -> Iterator[Check]:
    installed = _installed(facts)
    missing = [name for name in facts.extras if name not in installed]
    shown = ", ".join(installed) or "none"
    yield ok("extras", shown + (f" (not: {', '.join(missing)})" if missing else ""))
    for name in installed:
        for package in facts.extras[name]:
            if package.why_not is not None:
                yield warning(
                    "extras", f"{name}: {package.name} {package.found} {package.why_not}", install_command(name)
                )


def _installed(facts: Facts) -> list[str]:
    """Return the extras whose packages are all installed."""
    return [name for name, packages in facts.extras.items() if all(package.found for package in packages)]


def _too_large(loaded: float, gpus: Sequence[Gpu]) -> str:
    """Return advice for weights of this size in bytes."""
    for count in (2, 4, 8):
        if count <= len(gpus) and loaded <= count * _WEIGHTS_SHARE * min(gpu.free_bytes for gpu in gpus):
            return f"its weights do not fit one GPU: --tensor-parallel-size {count} shares them"
    return "its weights do not fit"


def _model(model: Model, facts: Facts) -> Check:
    name = f"model {model.name}"
    if model.error is not None:
        return problem(name, model.error, f"check its name or path; {SUPPORT_PAGE} lists what is supported")
    if model.needs is not None:
        return warning(name, model.needs, "download it, or let `serve` do so")
    kind = f" in {model.quantised}" if model.quantised else ""
    found = f"{model.architecture}, {model.weight_bytes / GB:.2f} GiB of weights{kind}, context {model.context}"
    gpus = facts.torch.gpus if not facts.torch.gpu_error else ()
    has_fp8 = any(FP8_WEIGHTS.runs_on(gpu.capability) for gpu in gpus)
    size = model.loaded
    assert size is not None, "the weights are there"
    if model.quantised and size.as_stored and not size.four_bits and gpus and not has_fp8:
        return problem(name, found, f"weights{kind} need a GPU of compute capability 9.0; --device cpu widens them")
    room = max((gpu.free_bytes for gpu in gpus), default=facts.memory_bytes)
    where = "GPU" if gpus else "memory"
    on_cpu = (size.int8_bytes if facts.torch.int8 else None) or size.float_bytes
    loaded = size.gpu_bytes if gpus else on_cpu
    if abs(loaded - model.weight_bytes) > _SHOWN_SHARE * loaded:
        found += f"; {size.kinds}, {loaded / GB:.2f} GiB in memory unless --dtype or --quantization says otherwise"
    if size.four_bits and has_fp8:
        found += f"; --quantization fp8 is faster from {MIN_FASTER_FP8_ROWS} requests at a time on"
    if loaded > room:
        return problem(name, f"{found}; {room / GB:.1f} GiB of {where} are free", _too_large(loaded, gpus))
    if loaded > _WEIGHTS_SHARE * room:
        return warning(
            name, f"{found}; {room / GB:.1f} GiB of {where} are free", "little memory is left for the KV cache"
        )
    return ok(name, found)


def _hosts(hosts: Hosts) -> Iterator[Check]:
    if hosts.tls_error is not None:
        yield problem("certificate", hosts.tls_error, "make one with `roseinfer certificates`")
    elif hosts.tls_dir is not None and hosts.tls_days is not None:
        yield _certificate(hosts.tls_dir, hosts.tls_days)
    if hosts.bind_error is not None:
        yield problem("bind", hosts.bind_error, "an address of this host, and a port that nobody listens on")
    elif hosts.bind is not None:
        yield ok("bind", f"{hosts.bind} is free")
    yield from map(_peer, hosts.peers)
    if hosts.ray is not None:
        yield _ray(hosts.ray)


def _certificate(folder: str, days: float) -> Check:
    found = f"the certificate in {folder} is valid for {days:.0f} days"
    if days < MIN_VALID_DAYS:
        return warning("certificate", found, "renew it with `roseinfer certificates`; nothing is restarted")
    return ok("certificate", found)


def _peer(peer: Peer) -> Check:
    name = f"engine {peer.address}"
    if peer.misfit:
        return problem(
            name, f"{peer.found}: {peer.error}", "start it with the same model and options as the other engines"
        )
    if peer.error is not None:
        advice = "start `roseinfer engine` of this version there, with a certificate of this CA, and open its port"
        return problem(name, peer.error, advice)
    if not peer.up:
        return warning(name, peer.found, "it accepts no requests at present: check its log")
    return ok(name, peer.found)


def _ray(ray: RayCluster) -> Check:
    if ray.error is not None:
        return problem("Ray", ray.error, "docs/how-to/ray.md explains how to start a cluster")
    if ray.token_error is not None:
        advice = "export RAY_AUTH_MODE=token; ray get-auth-token --generate, once, and the same file on all machines"
        return warning("Ray", f"{ray.version}, {ray.token_error}", advice)
    where = "" if ray.address == "auto" else f", and {ray.address} answers"
    return ok("Ray", f"{ray.version} with a token{where}")
