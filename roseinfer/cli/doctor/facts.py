"""What is known of a machine and an installation, as plain data, whoever found it out."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Package:
    """A requirement of ours: `wanted` as the metadata has it, `found` its version or None.

    `why_not`: how the version does not fit, as the end of a sentence.
    """

    name: str
    wanted: str
    found: str | None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bytes of its memory; `capability` as in (9, 0)."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Torch:
    """What PyTorch said in a process of its own.

    `error`: it could not be asked, and why. `gpu_error`: there are GPUs, and they could not be used. `kernel_error`:
    one of our Triton kernels does not run. `cpu_gflops`: of a float32 product on all cores.
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


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was asked about. `error`: why it cannot be served; `needs`: what it lacks yet, as a download.

    `quantised`: how its weights are in FP8, None for floats. `widened`: of a GGUF file how many they are and how they
    are kept there, because they are widened while they load.
    """

    name: str
    error: str | None = None
    needs: str | None = None
    architecture: str = ""
    weight_bytes: int = 0
    context: int = 0
    quantised: str | None = None
    widened: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine on another host. `error`: why it cannot be used; with `misfit`, beside the first one. `up`: it takes
    requests just now.
    """

    address: str
    found: str = ""
    error: str | None = None
    up: bool = True
    misfit: bool = False


@dataclass(frozen=True, slots=True)
class RayCluster:
    """`error`: why nothing can be deployed on it. `token_error`: why it is not shown a token."""

    address: str
    version: str = ""
    error: str | None = None
    token_error: str | None = None


@dataclass(frozen=True, slots=True)
class Hosts:
    """What was asked of other hosts, and of this one for others. `bind`: where an engine is to listen."""

    secret_file: str | None = None
    secret_error: str | None = None
    bind: str | None = None
    bind_error: str | None = None
    peers: tuple[Peer, ...] = ()
    ray: RayCluster | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """`gpu_files`: whether the kernel shows NVIDIA GPUs. `cpu_quota`: cores that a container may use, None = all.

    `files`: soft and hard limit on open files, None without one. `temporary_error`: why sockets cannot live there.
    `port`: where a server is to listen, None if none is. `port_error`: why it cannot. `hosts`: None if nobody asked.
    """

    roseinfer: str
    python: tuple[int, int, int]
    platform: str
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
