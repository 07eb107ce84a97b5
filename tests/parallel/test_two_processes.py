"""Two processes that share a model compute the same as one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from roseinfer.core.errors import ConfigError
from roseinfer.models.config import read_model_spec
from tests.helpers import gguf_files
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import VOCAB, make_reference, reference_logits, save_reference
from tests.helpers.int4_files import MAKERS as INT4_MAKERS
from tests.helpers.int4_files import quantise_folder
from tests.helpers.loaded import load
from tests.helpers.mxfp4_files import make_packable, pack_folder
from tests.helpers.weights import Imagined
from tests.quant.test_fp8_checkpoints import MAKERS
from tests.quant.test_fp8_checkpoints import make as make_fp8

TOKENS = [5, 17, 3, 88, 42, 9, 1, 60, 98, 0]

# Sizes that blocks of 128 and two processes divide.
WIDE = {"hidden_size": 256, "head_dim": 128}
FAMILIES = (
    "llama",
    "llama-tied",
    "llama-bias",
    "qwen3",
    "gpt2",
    "qwen3-moe-dense",
    "mixtral",
    "gpt-oss",
    "phi3",
    "granite",
    "glm4",
    "olmo2",
    "gemma3",
    "qwen3.5-moe",
    "qwen3-next",
)
ROUNDED = ("fp8", "fp8-experts", "awq", "gptq-v2", "mxfp4", "dense.gguf", "experts.gguf")

# Each rank computes all cases in one process, as importing torch takes most of the time.
RANK = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.shared_store import SharedStore
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.loaded import load

store, rank, size, tokens, out, *cases = sys.argv[1:]
tokens = [int(token) for token in tokens.split(",")]
group = ProcessGroup(Rendezvous(SharedStore(int(store)), "two", int(rank), int(size)))
results = {}
for case in cases:
    folder, load_format = Path(case.partition("=")[0]), case.partition("=")[2]
    quantization = None if load_format == "dummy" else "floats"
    model = load(folder, group=group, load_format=load_format, seed=3, quantization=quantization)
    runner = HandRunner(model)
    table = runner.blocks.table(len(tokens))
    cut = len(tokens) - 3  # a chunk, then decoding over what it left in the cache
    logits = runner.run([HandRow(tokens=tokens, table=table, start=0, count=cut)])
    for at in range(cut, len(tokens)):
        logits += runner.run([HandRow(tokens=tokens, table=table, start=at, count=1)])
    kv = sum(part.numel() for part in runner.store.parts)
    results[folder.name, load_format] = {"logits": torch.cat(logits), "kv": kv}
torch.save(results, out)
group.close()
"""


Results = dict[tuple[str, str], dict[str, Any]]


def run_ranks(out: Path, size: int, cases: list[str]) -> list[Results]:
    command, tokens = [sys.executable, "-m", "tests.helpers.run_code", RANK], ",".join(map(str, TOKENS))
    files = [out / f"rank-{rank}.pt" for rank in range(size)]
    with (out / "store").open("w+b") as store:
        ranks = [
            subprocess.Popen(
                [*command, str(store.fileno()), str(rank), str(size), tokens, str(file), *cases],
                pass_fds=[store.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, file in enumerate(files)
        ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [torch.load(file) for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_reference(make_reference(family), folder / family)
    make_fp8(folder / "fp8", MAKERS[0], **WIDE, intermediate_size=512)
    make_fp8(folder / "fp8-experts", MAKERS[0], "qwen3-moe", **WIDE, moe_intermediate_size=256)
    for maker in (INT4_MAKERS[0], INT4_MAKERS[2]):
        quantise_folder(
            save_reference(make_reference("qwen3", **WIDE, intermediate_size=512), folder / maker.name),
            replace(maker, rounds=True),
        )
    pack_folder(save_reference(make_packable(), folder / "mxfp4"))
    write_gguf(folder / "dense.gguf", make_reference("llama", hidden_size=256, intermediate_size=512))
    write_gguf(folder / "experts.gguf", make_reference("mixtral", hidden_size=256, intermediate_size=256))
    return folder


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """Write a file with all supported matrices in Q4_0. Weights are small, so that rounding errors stay small."""

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        if values.ndim == 1 or values.shape[-1] % 32:
            return values, "F32"
        return gguf.quantize(values / 4, gguf.GGMLQuantizationType.Q4_0), "Q4_0"

    gguf_files.write(path, gguf_files.metadata_of(model, VOCAB), gguf_files.tensors_of(model, encode))


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    cases = [f"{folder / name}=auto" for name in (*FAMILIES, *ROUNDED)]
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2, [*cases, f"{folder / 'gpt2'}=dummy"])


def alone(folder: Path, load_format: str) -> HandRunner:
    quantization = None if load_format == "dummy" else "floats"
    return HandRunner(load(folder, load_format=load_format, seed=3, quantization=quantization))


@pytest.mark.parametrize("case", [*((name, "auto") for name in (*FAMILIES, *ROUNDED)), ("gpt2", "dummy")])
def test_two_ranks_equal_one(case: tuple[str, str], folder: Path, ranks: list[Results]) -> None:
    """Heads, K/V and their cache are halved; the vocabulary, 99, is odd."""
    runner = alone(folder / case[0], case[1])
    row = HandRow(tokens=TOKENS, table=runner.blocks.table(len(TOKENS)), start=0, count=len(TOKENS))
    expected = runner.run([row])[0]
    first, second = (rank[case] for rank in ranks)
    assert torch.equal(first["logits"], second["logits"]), "ranks that see other logits sample other tokens"
    scale = expected.abs().max()
    assert scale > 0.1
    torch.testing.assert_close(first["logits"] / scale, expected / scale, rtol=0, atol=1e-5)
    assert first["kv"] * 2 == sum(part.numel() for part in runner.store.parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_transformers(family: str, ranks: list[Results]) -> None:
    expected = reference_logits(make_reference(family), TOKENS)
    torch.testing.assert_close(ranks[0][family, "auto"]["logits"], expected, rtol=0, atol=1e-4)


def test_heads_that_cannot_be_split_are_rejected_before_weights_are_read(tmp_path: Path) -> None:
    folder = save_reference(make_reference("llama"), tmp_path)
    (folder / "model.safetensors").unlink()
    spec = read_model_spec(folder)
    with pytest.raises(ConfigError, match="4 attention heads cannot be divided evenly among 3 processes"):
        load(folder, spec, group=Imagined(0, 3))
