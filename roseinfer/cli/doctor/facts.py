"""Facts about a machine and an installation, as plain data."""

from dataclasses import dataclass, field

from roseinfer.models.loaded_size import LoadedSize


@dataclass(frozen=True, slots=True)
class Package:
    """One of our requirements: `wanted` in the metadata, `found` version or None.

    `why_not` completes a sentence on why the version does not fit.
    """

    name: str
    wanted: str
    found: str | None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: memory in bytes; `capability` such as (9, 0)."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Torch:
    """Report of PyTorch, asked in a separate process.

    `error`: why it could not be asked. `gpu_error`: why existing GPUs cannot be used. `kernel_error`: one of our Triton
    kernels does not run. `cpu_gflops`: speed of a float32 product on all cores. `cpu_functions`: instructions that
    the compiled functions for CPUs use, None without these. `int8`: the CPU has products in int8.
    """

    version: str = ""
    error: str | None = None
    cuda: str | None = None
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str | None = None
    triton: str | None = None
    kernel_error: str | None = None
    threads: int = 0
    cpu_gflops: float = 0.0
    cpu_functions: str | None = None
    int8: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """Model that was checked. `error`: why it cannot be served; `needs`: what is missing, such as a download.

    `quantised`: kind of quantised weights, None for floats. `loaded`: size of the weights in memory; None if they are
    not there, or wrong.
    """

    name: str
    error: str | None = None
    needs: str | None = None
    architecture: str = ""
    weight_bytes: int = 0
    context: int = 0
    quantised: str | None = None
    loaded: LoadedSize | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """Engine on another host. `error`: why it cannot be used; `misfit`: how it differs from the first engine. `up`: it
    accepts requests.
    """

    address: str
    found: str = ""
    error: str | None = None
    up: bool = True
    misfit: bool = False


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Ray cluster. `error`: why nothing can be deployed on it. `token_error`: why it receives no token."""

    address: str
    version: str = ""
    error: str | None = None
    token_error: str | None = None


@dataclass(frozen=True, slots=True)
class Hosts:
    """Checks of other hosts, and of this one for them. `bind`: where an engine is to listen.

    `tls_days`: until our certificate expires.
    """

    tls_dir: str | None = None
    tls_error: str | None = None
    tls_days: float | None = None
    bind: str | None = None
    bind_error: str | None = None
    peers: tuple[Peer, ...] = ()
    ray: RayCluster | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts. `system`: as in `sys.platform`. `gpu_files`: the kernel shows NVIDIA GPUs.

    `cpu_quota`: cores of a container, None = all. `files`: soft and hard limit on open files, None without one.
    `temporary_error`: why sockets cannot be created. `port`: port of the server, None if there is none; `port_error`:
    why it cannot be used. `hosts`: None if not asked for.
    """

    roseinfer: str
    python: tuple[int, int, int]
    platform: str
    system: str
    packages: tuple[Package, ...]
    extras: dict[str, tuple[Package, ...]] = field(default_factory=dict)
    torch: Torch = Torch()
    gpu_files: bool = False
    cores: int = 1
    cpu_quota: float | None = None
    memory_bytes: int = 0
    files: tuple[int | None, int | None] = (None, None)
    temporary: str = ""
    temporary_error: str | None = None
    port: int | None = 8000
    port_error: str | None = None
    model: Model | None = None
    hosts: Hosts | None = None
