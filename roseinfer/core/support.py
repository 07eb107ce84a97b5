"""Supported machines, and those on which roseinfer was tested: data of `roseinfer doctor` and of the errors at start.

`docs/reference/support.md` has the same tables; a test compares them.
"""

from dataclasses import dataclass

SUPPORT_PAGE = "docs/reference/support.md"

# Compute capability of a GPU, such as (9, 0).
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuFeature:
    """Feature that needs compute capability `oldest` or newer, and no newer generation than `newest` if that is set."""

    name: str
    oldest: Capability
    newest: int | None = None

    def runs_on(self, capability: Capability) -> bool:
        return capability >= self.oldest and (self.newest is None or capability[0] <= self.newest)


@dataclass(frozen=True, slots=True)
class GpuGeneration:
    """NVIDIA's name of a generation, its compute capabilities, and GPUs of it. `tested`: those that were tested."""

    name: str
    capabilities: tuple[Capability, ...]
    examples: str
    tested: str = ""


KERNELS = GpuFeature("models in 16 and 32 bits, GGUF files, CUDA graphs", (8, 0))  # Triton supports no older GPUs
FP8_KV = GpuFeature("K and V in FP8", (8, 9))
FP8_WEIGHTS = GpuFeature("weights in FP8, a scale for each row (--quantization fp8)", (9, 0))
FP8_BLOCKS = GpuFeature("weights in FP8, a scale for each block of 128 x 128", (9, 0), newest=9)
INT4_WEIGHTS = GpuFeature("weights in four bits (AWQ, GPTQ, compressed-tensors, NVFP4, GGUF's Q4_0 and Q4_K)", (8, 0))
EXPERTS = GpuFeature("models with experts", (9, 0))
# Requests at a time from which weights in FP8 are faster than in four bits, on an H200.
MIN_FASTER_FP8_ROWS = 33
LARGE_STEPS = GpuFeature("faster attention and linear attention in large steps", (9, 0), newest=9)
GPU_FEATURES = (KERNELS, FP8_KV, FP8_WEIGHTS, FP8_BLOCKS, INT4_WEIGHTS, EXPERTS, LARGE_STEPS)

GPU_GENERATIONS = (
    GpuGeneration("Ampere", ((8, 0), (8, 6)), "A100, A10, RTX 30"),
    GpuGeneration("Ada", ((8, 9),), "L4, L40S, RTX 40"),
    GpuGeneration("Hopper", ((9, 0),), "H100, H200", tested="H100, H200"),
    GpuGeneration("Blackwell", ((10, 0), (10, 3), (12, 0)), "B200, B300, RTX 50"),
)

OPERATING_SYSTEMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
SUPPORTED_SYSTEM = "linux"


def generation_of(capability: Capability) -> GpuGeneration | None:
    """Return the generation of a GPU; None if the tables do not have it."""
    return next((one for one in GPU_GENERATIONS if capability in one.capabilities), None)


def missing_features(capability: Capability) -> list[str]:
    """Return the names of the features that a GPU does not have."""
    return [feature.name for feature in GPU_FEATURES if not feature.runs_on(capability)]


def system_error(platform: str) -> str | None:
    """Return why models cannot run on an operating system (`sys.platform`); None if it is supported."""
    if platform == SUPPORTED_SYSTEM:
        return None
    name = OPERATING_SYSTEMS.get(platform, platform)
    return f"models run on Linux only, not on {name}: use a Linux machine, a virtual machine or a container"
