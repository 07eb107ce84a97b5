"""Engines with a multi-token prediction head: texts stay, and each draft is the plain reference's.

The drafts that are verified are other ones, of which 7 in 10 are right: a random head is seldom right.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.sched.drafting.drafting import Drafting
from tests.equivalence.small_engines import PROMPTS, build, start
from tests.equivalence.test_eagle import MAX_DRAFTS, SAMPLING, RecordingHead, texts_of
from tests.helpers.checkpoints import HYBRIDS, VOCAB, make_reference, save_reference
from tests.helpers.drafters import EveryDraft, Oracle
from tests.helpers.fp8_files import by_block, quantise
from tests.helpers.int4_files import MAKERS as MAKERS_INT4
from tests.helpers.int4_files import quantise_folder, write_tensors
from tests.helpers.mtp_reference import MtpReference
from tests.quant.test_fp8_checkpoints import MAKERS
from tests.quant.test_fp8_checkpoints import make as make_fp8

SETTINGS: dict[str, dict[str, Any]] = {
    "prefix hits": {"state_slots": 30},
    "chunks": {"enable_prefix_caching": False, "long_prefill_token_threshold": 7, "overlap": True},
    "few blocks": {"num_kv_blocks": 24, "scheduling_policy": "fifo", "state_slots": 12},
}
FAMILIES = [*list(HYBRIDS)[:2], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(HYBRIDS)[2:])]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_reference(request.param)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_reference(model, tmp_path_factory.mktemp("mtp") / "model")
    MtpReference(model).add_to(path)
    return path


def test_texts_stay_and_drafts_are_the_references(model: PreTrainedModel, folder: Path) -> None:
    core = start(folder, speculation="off")
    texts = texts_of(core)
    core.close()
    reference, shares = MtpReference(model), {}
    for setting in SETTINGS if model.config.model_type == "qwen3_5_text" else ("chunks",):
        core, head = start(folder, speculation="mtp,tokens=3", **SETTINGS[setting]), RecordingHead()
        oracle = Oracle(texts, VOCAB, 0.7, most=MAX_DRAFTS)
        core.scheduler.drafting = Drafting((oracle,), EveryDraft(), MAX_DRAFTS, head)
        assert texts_of(core) == texts, setting
        core.close()
        right = wrong = 0
        for request_id, tokens, drafts in head.seen[::3]:  # the reference computes the whole text each time
            name = request_id.partition(":")[0]
            if name in SAMPLING:
                continue
            states = reference.states([*PROMPTS[name], *texts[request_id]])[: len(tokens) - 1]
            expected, logits = reference.draft(tokens, states, len(drafts.token_ids))
            for found, wanted, values, chance in zip(drafts.token_ids, expected, logits, drafts.chances, strict=True):
                best = values.topk(2).values
                if best[0] - best[1] < 1e-3:
                    break
                if found != wanted or abs(chance - float(values.softmax(-1).max())) > 1e-3:
                    wrong += 1
                    break
                right += 1
        shares[setting] = wrong / (right + wrong)
        assert right > 20, setting
    # After a prefix hit and a preemption, the head lacks the state of one token.
    assert shares.pop("few blocks", 0) + shares.pop("prefix hits", 0) < 0.8 and not any(shares.values())


def test_a_checkpoint_without_a_head_is_refused_by_name(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    path = save_reference(model, tmp_path / "without")
    with pytest.raises(UnsupportedModelError, match=r"'mtp' needs .* has no tensor mtp\.fc\.weight"):
        build(path, speculation="mtp")
    tensors = load_file(folder / "model.safetensors")
    more = {**tensors, "mtp.layers.1.input_layernorm.weight": tensors["mtp.layers.0.input_layernorm.weight"].clone()}
    save_file(more, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor mtp\.layers\.1"):
        build(path, speculation="mtp")


def test_models_of_other_families_have_no_head(tmp_path: Path) -> None:
    path = save_reference(make_reference("llama"), tmp_path)
    with pytest.raises(UnsupportedModelError, match="'mtp' is not supported by LlamaForCausalLM"):
        build(path, speculation="mtp")


def test_the_start_names_a_head_only_if_it_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    found = []
    for method in ("off", "mtp"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            build(folder, speculation=method)[0].close()
        found.append("multi-token prediction head is left out" in caplog.text)
    assert found == [True, False]


def test_a_head_in_fp8_is_widened(tmp_path: Path) -> None:
    """Drafts are those of the same weights without FP8, while the rest of the model is the same."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128}
    sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    make_fp8(tmp_path, MAKERS[0], "qwen3.5", **sizes)
    model = make_reference("qwen3.5", **sizes)
    stored, seen = load_file(tmp_path / "model.safetensors"), []
    narrow, wide = quantise(MtpReference(model).tensors(), "weight_scale_inv", by_block)
    assert "mtp.layers.0.mlp.up_proj.weight_scale_inv" in narrow
    for head in (narrow, wide):
        save_file({**stored, **head}, tmp_path / "model.safetensors", {"format": "pt"})
        core, recorder = start(tmp_path, speculation="mtp,tokens=3"), RecordingHead()
        core.scheduler.drafting = Drafting((recorder,), EveryDraft(), MAX_DRAFTS, recorder)
        texts_of(core, prompts=("longer", "one"))
        core.close()
        seen.append(recorder.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 20


def test_biases_that_gptq_adds_to_a_head_have_to_be_zeros(tmp_path: Path) -> None:
    model = make_reference("qwen3.5", hidden_size=128, intermediate_size=192)
    MtpReference(model).add_to(save_reference(model, tmp_path))
    quantise_folder(tmp_path, MAKERS_INT4[1])
    stored = load_file(tmp_path / "model.safetensors")
    bias = "mtp.layers.0.mlp.up_proj.bias"
    write_tensors(tmp_path, stored | {bias: torch.zeros(192)})
    build(tmp_path, speculation="mtp")[0].close()
    write_tensors(tmp_path, stored | {bias: torch.full((192,), 0.5)})
    with pytest.raises(UnsupportedModelError, match=f"tensor {bias} is not zero"):
        build(tmp_path, speculation="mtp")
