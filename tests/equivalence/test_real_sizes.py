"""Layers as large as in real models on a GPU, against the same weights in float32 on a CPU.

A compiler may arrange large blocks unlike small ones, and what overlaps only there may go wrong only there. The prompts
run every kernel that is chosen by the number of tokens in a step.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from roseinfer.attention.select import make_attention, resolve_backend
from roseinfer.models.config import read_model_spec
from roseinfer.models.decoder import Decoder
from tests.equivalence.real_sizes import REAL_LAYERS, RealLayers
from tests.equivalence.runs import ids
from tests.helpers.attention import shape_of
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.loaded import load as load_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0, for FP8 in blocks",
)
DEVICE = "cuda"
# One prompt in chunks: configs change at about 4, 16, 32, 64, 128, 256, 800 and 2,048 tokens.
CHUNKS = (1, 3, 17, 70, 150, 400, 900, 2100)
# Prompts of one step, and those that join them when they decode.
EARLY = tuple(range(3, 63, 3))
LATE = (5, 40, 130, 300)
MAX_LEN = sum(CHUNKS)
# Rounding may decide which experts a few tokens choose. A CPU in bfloat16 has the same distribution of errors.
MIN_SHARE_ROUTED_ALIKE, MIN_SHARE_NEAR = 0.9, 0.99
MAX_NEAR_TIE_ERROR = 0.5
MIN_THREADS = 4


@dataclass
class Fed:
    """Tokens of a request, and how many are computed."""

    tokens: list[int]
    table: list[int]
    start: int = 0

    def next(self, count: int) -> HandRow:
        self.start += count
        return HandRow(tokens=self.tokens, table=self.table, start=self.start - count, count=count)


def runner_of(model: Decoder) -> HandRunner:
    """Return a runner with the attention that the engine chooses."""
    runner = HandRunner(model, block_size=16, num_blocks=384)
    backend = resolve_backend("auto", model.attention, model.dtype, model.device)
    sizes = {"max_rows": 32, "max_tokens": MAX_LEN, "max_model_len": MAX_LEN}
    runner.attention = make_attention(
        backend, shape_of(*model.attention, device=model.device, dtype=model.dtype, **sizes)
    )
    return runner


def run(model: Decoder) -> dict[str, torch.Tensor]:
    """Return the logits [tokens, vocab] of each step."""
    runner = runner_of(model)

    def feed(length: int) -> Fed:
        return Fed(ids(length + 2, length), runner.blocks.table(length + 2))

    one, early, late = feed(MAX_LEN), [feed(length) for length in EARLY], [feed(length) for length in LATE]
    steps = {f"chunk of {count}": [(one, count)] for count in CHUNKS}
    steps["prompts"] = list(zip(early, EARLY, strict=True))
    steps["decodes and prompts"] = [*((fed, 1) for fed in early), *zip(late, LATE, strict=True)]
    steps["decodes"] = [(fed, 1) for fed in (*early, *late)]
    return {name: torch.cat(runner.run([fed.next(count) for fed, count in step])) for name, step in steps.items()}


def load(path: Path, device: str, dtype: str, **options: str) -> Decoder:
    spec = read_model_spec(path)
    return load_checkpoint(path, spec, dtype=dtype, device=torch.device(device), **options)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Share the cores with the other workers, which finish at different times."""
    before, workers = torch.get_num_threads(), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(MIN_THREADS, len(os.sched_getaffinity(0)) // workers))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep gigabytes of three runs
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layers", REAL_LAYERS.values(), ids=REAL_LAYERS)
def test_a_gpu_computes_what_a_cpu_does(layers: RealLayers, folder: Path) -> None:
    path = layers.save(folder, DEVICE)
    model = load(path, DEVICE, "bfloat16")
    found, again = run(model), run(model)
    expected = run(load(path, "cpu", "float32", quantization="floats"))
    limits = {1.0: layers.max_error}
    if layers.routed:
        limits = {MIN_SHARE_ROUTED_ALIKE: layers.max_error, MIN_SHARE_NEAR: MAX_NEAR_TIE_ERROR}
    wrong = []
    for step, exact in expected.items():
        errors = (found[step] - exact).norm(dim=1) / exact.norm(dim=1)
        summary = f"{step}: {', '.join(f'{errors.quantile(share):.4f}' for share in limits)}"
        print(summary)
        if not all(errors.quantile(share) < limit for share, limit in limits.items()):
            wrong.append(summary)
        if not torch.equal(found[step], again[step]):
            wrong.append(f"{step}: the same step had another result")
    assert not wrong
