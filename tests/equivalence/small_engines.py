"""Engines for checkpoints of `tests.helpers.checkpoints`, and prompts that share prefixes."""

from pathlib import Path

from roseinfer.engine.api import EngineInfo
from roseinfer.engine.build import build_engine
from roseinfer.engine.core import EngineCore
from roseinfer.engine.options import make_engine_config
from tests.helpers.checkpoints import VOCAB

SHARED = [7, 21, 3, 64, 11, 90, 35, 2, 17, 58, 41]
PROMPTS = {
    "shared": SHARED,
    "again": SHARED,
    "longer": [*SHARED, 5, 80, 33],
    "branch": [*SHARED[:8], 71, 72, 73, 74, 75],
    "one": [42],
    "long": [(i * 37 + 5) % VOCAB for i in range(45)],
}
# A GPU captures graphs up to `max_num_batched_tokens`.
_OPTIONS = {
    "block_size": 4,
    "num_kv_blocks": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "typical_context": 32,
}


def build(path: Path, **options: object) -> tuple[EngineCore, EngineInfo]:
    """Return an engine in float32. `options`: those of `LLM`, in place of small ones."""
    options = {**_OPTIONS, "dtype": "float32", "threads": 1, **options}
    return build_engine(make_engine_config(model=str(path), **options), path)


def start(path: Path, **options: object) -> EngineCore:
    return build(path, **options)[0]
