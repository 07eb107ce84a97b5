"""Two ranks, each with a GPU or taking turns on one: engines generate what one process does, and end with a rank."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roseinfer.core.errors import EngineDeadError
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.messages import Add
from roseinfer.parallel import one_gpu
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.head import MTP, HeadProposer
from tests.equivalence.models import VOCAB, save_model
from tests.equivalence.near_ties import compare
from tests.equivalence.runs import CUDA, LENGTHS, LISTED, PROMPTS, Run, Runs, drain, ids, run, start
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.drafters import EveryDraft
from tests.helpers.fp8_files import by_block, quantise, write
from tests.helpers.mtp_reference import MtpReference
from tests.helpers.process_table import alive
from tests.models.test_quantization import QWEN3_FP8
from tests.ranks.test_two_ranks import rank_processes

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a GPU")

# Of log probabilities, as in `test_bfloat16`. In FP8, activations of larger steps are rounded too.
TOLERANCES = {"bf16": 0.12, "fp8": 0.3}
# Sizes that two ranks and blocks of 128 divide.
_SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "hidden_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "attention_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {**_SIZES, "intermediate_size": 1024},
    "qwen3-moe": {**_SIZES, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 4},
}
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
over_gpus = pytest.mark.parametrize(
    "pair",
    [
        pytest.param({"tensor_parallel_size": 2, "ranks_on_one_gpu": True}, id="one GPU"),
        pytest.param({"tensor_parallel_size": 2}, id="two GPUs", marks=needs_two),
    ],
)


def round_to_fp8(folder: Path) -> None:
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    write(folder, quantise(weights, "weight_scale_inv", by_block)[0])
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": QWEN3_FP8}))


@over_gpus
@pytest.mark.parametrize("stored", TOLERANCES)
@pytest.mark.parametrize("family", SHAPES)
def test_two_ranks_generate_what_one_does(family: str, stored: str, pair: dict[str, Any], tmp_path: Path) -> None:
    """Steps are graphs, two are in flight, prompts are in the prefix cache, and requests are preempted."""
    path = save_model(family, SHAPES[family], tmp_path)
    if stored == "fp8":
        round_to_fp8(path)
    runs = Runs(path)
    one, two = (runs.run("all at once", "cuda", "bfloat16", **options) for options in ({}, pair))
    seen = compare(one, two, TOLERANCES[stored])
    print(seen)
    assert seen.tokens > len(PROMPTS["long"]) + sum(LENGTHS.values()) // 4


@needs_two
@pytest.mark.parametrize("stored", TOLERANCES)
def test_long_prompts_are_exchanged_in_pieces(stored: str, tmp_path: Path) -> None:
    path = save_model("qwen3", SHAPES["qwen3"] | {"max_position_embeddings": 16_384}, tmp_path)
    if stored == "fp8":
        round_to_fp8(path)
    params = SequenceParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=LISTED)
    options: dict[str, Any] = {"max_model_len": 9_472, "num_kv_blocks": 640, "max_num_batched_tokens": 9_472}
    runs: list[Run] = []
    for ranks in (1, 2):
        core, found = start(path, "cuda", "bfloat16", tensor_parallel_size=ranks, **options), {}
        core.add(Add("r", Prompt(ids(9_300, 0), params)))
        drain(core, found)
        core.close()
        runs.append(found)
    assert compare(*runs, TOLERANCES[stored]).tokens


@over_gpus
def test_drafts_of_two_ranks_change_nothing(pair: dict[str, Any], tmp_path: Path) -> None:
    model = make_reference("qwen3.5", vocab_size=VOCAB)
    MtpReference(model).add_to(save_reference(model, tmp_path))
    options: dict[str, Any] = {"enforce_eager": False, "enable_chunked_prefill": True}
    core = start(tmp_path, "cuda", "float32", **options)
    expected = run(core)
    core.close()
    core = start(tmp_path, "cuda", "float32", speculation="mtp,tokens=3", **options, **pair)
    proposer = HeadProposer(3, MTP)
    core.scheduler.drafting = drafting = Drafting((proposer,), EveryDraft(), 3, proposer)
    assert not compare(run(core), expected, 1e-3).parted
    assert drafting.counts[MTP].steps > 20
    core.close()


@over_gpus
def test_a_rank_that_dies_ends_running_requests(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_gpu, "ONE_GPU_STEP_TIMEOUT_S", 2.0)
    before = rank_processes()
    core = start(save_model("qwen3", SHAPES["qwen3"], tmp_path), "cuda", "bfloat16", enforce_eager=False, **pair)
    (rank,) = rank_processes() - before
    core.add(Add("r", Prompt(PROMPTS["short"], SequenceParams(max_tokens=200, temperature=0.0, ignore_eos=True))))
    for _ in range(5):
        core.step()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="the process of rank 1 ended with code -9"):
        while core.busy:
            core.step()
    core.close()
    assert not alive(rank)
