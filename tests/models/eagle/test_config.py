"""Reader of EAGLE-3 folders: both formats, every refusal by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.models.decoder import Decoder
from roseinfer.models.eagle.config import read_eagle_spec
from roseinfer.models.eagle.loader import load_eagle_head
from roseinfer.models.eagle.spec import EagleSpec
from roseinfer.models.spec import LayerSpec, ModelSpec, NormSpec
from tests.helpers.eagle_folders import EagleFolder
from tests.helpers.loaded import load

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "max_position_embeddings": 4096,
    "vocab_size": 50,
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def target_of(folder: Path, **changes: Any) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return read_model_spec(folder)


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    return target_of(tmp_path / "target")


def folder_of(**options: Any) -> EagleFolder:
    return EagleFolder(**{"target_hidden": 32, "vocabulary": 50, "ids": None, **options})


def read(tmp_path: Path, target: ModelSpec, aux: str = "auto", **options: Any) -> EagleSpec:
    return read_eagle_spec(folder_of(**options).write(tmp_path / "head"), target, aux)


@pytest.mark.parametrize("nested", [False, True])
def test_a_whole_config(tmp_path: Path, target: ModelSpec, nested: bool) -> None:
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5, skips_first=True)
    assert read(tmp_path, target, nested=nested, targets=(1, 5, 6)) == EagleSpec(
        layer=LayerSpec(attention=attention, rope=RopeSpec(theta=10000.0)),
        hidden_size=32,
        intermediate_size=48,
        vocab_size=50,
        draft_vocab_size=3,
        norm=NormSpec(eps=1e-6),
        activation="silu",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tied=False,
        boundaries=(2, 6, 9),
        state_width=32,
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("flag", FLAGS)
def test_flags(tmp_path: Path, target: ModelSpec, flag: str, nested: bool) -> None:
    spec = read(tmp_path, target, nested=nested, flags=(flag,))
    assert [name for name in FLAGS if getattr(spec, name)] == [flag]


def test_flags_of_nvidia(tmp_path: Path, target: ModelSpec) -> None:
    options = {"eagle_aux_hidden_state_layer_ids": [2, 5, 7], "norm_before_fc": True, "use_aux_hidden_state": True}
    spec = read(tmp_path, target, changes={"eagle_config": options})
    assert spec.norm_before_fc and spec.boundaries == (2, 5, 7)


@pytest.mark.parametrize(
    ("ids", "nested", "aux", "boundaries"),
    [
        ((1, 5, 8), False, "auto", (2, 6, 9)),
        ((2, 6, 9), False, "auto", (2, 6, 9)),
        ((1, 5, 8), True, "auto", (1, 5, 8)),
        ((1, 5, 8), True, "outputs", (2, 6, 9)),
        ((2, 6, 9), False, "outputs", (3, 7, 10)),
        ((0, 4), False, "inputs", (0, 4)),
        ((3, 11), False, "outputs", (4, 12)),
        ((3, 12), False, "inputs", (3, 12)),
    ],
)
def test_listed_layers(
    tmp_path: Path,
    target: ModelSpec,
    ids: tuple[int, ...],
    nested: bool,
    aux: str,
    boundaries: tuple[int, ...],
) -> None:
    assert read(tmp_path, target, aux, ids=ids, nested=nested).boundaries == boundaries


def test_a_head_of_another_width(tmp_path: Path, target: ModelSpec) -> None:
    spec = read(tmp_path, target, hidden=24)
    assert (spec.hidden_size, spec.state_width) == (24, 32)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"changes": {"architectures": ["LlamaForCausalLM"]}}, "architectures"),
        ({"changes": {"architectures": ["GptOssForCausalLMEagle3"]}}, "architectures"),
        ({"inner_changes": {"model_type": "qwen3"}}, "model_type"),
        ({"inner_changes": {"num_hidden_layers": 2}}, "num_hidden_layers"),
        ({"inner_changes": {"bias": True}}, "bias"),
        ({"inner_changes": {"sliding_window": 512}}, "sliding_window"),
        ({"inner_changes": {"use_sliding_window": True}}, "use_sliding_window"),
        ({"inner_changes": {"layer_types": ["sliding_attention"]}}, "layer_types"),
        ({"inner_changes": {"hidden_size": 64}}, "hidden_size"),
        ({"inner_changes": {"vocab_size": 51}}, "vocab_size"),
        ({"inner_changes": {"logit_softcap": 3.0}}, "logit_softcap"),
        ({"changes": {"target_hidden_size": 64}}, "target_hidden_size"),
        ({"changes": {"draft_vocab_size": 51}}, "draft_vocab_size"),
        ({"changes": {"norm_after_fc": True}}, "norm_after_fc"),
        ({"changes": {"norm_output": 1}}, "norm_output"),
        ({"changes": {"quantization_config": {"quant_method": "fp8"}}}, "quantization_config"),
        ({"changes": {"eagle_config": {"use_aux_hidden_state": False}}}, "use_aux_hidden_state"),
        ({"changes": {"eagle_config": {"parallel_draft_step": 2}}}, "parallel_draft_step"),
        ({"flags": ("norm_before_fc", "fc_norm")}, "fc_norm"),
        ({"ids": (3, 6, 9)}, "aux="),
        ({"ids": (2, 9, 6)}, "eagle_aux_hidden_state_layer_ids"),
        ({"ids": (2, 2)}, "eagle_aux_hidden_state_layer_ids"),
        ({"ids": (2, 13)}, "eagle_aux_hidden_state_layer_ids"),
        ({"ids": (1, 12)}, "eagle_aux_hidden_state_layer_ids"),
        ({"ids": (2, 6.5)}, "eagle_aux_hidden_state_layer_ids"),
        ({"nested": True, "changes": {"speculators_model_type": "dflash"}}, "speculators_model_type"),
        ({"nested": True, "changes": {"speculators_config": {"algorithm": "mtp"}}}, "speculators_config"),
        ({"nested": True, "changes": {"norm_before_residual": None}}, "norm_before_residual"),
        ({"nested": True, "changes": {"transformer_layer_config": None}}, "transformer_layer_config"),
    ],
)
def test_refused_fields(tmp_path: Path, target: ModelSpec, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(tmp_path, target, **options)


def test_few_layers_need_a_list(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", num_hidden_layers=4)
    with pytest.raises(UnsupportedModelError, match="eagle_aux_hidden_state_layer_ids"):
        read(tmp_path, target)


def test_a_folder_without_config(tmp_path: Path, target: ModelSpec) -> None:
    with pytest.raises(ModelNotFoundError):
        read_eagle_spec(tmp_path, target)


def test_a_pickle_is_refused_with_its_conversion(tmp_path: Path, target: ModelSpec) -> None:
    folder = folder_of().write(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model.bin.*safetensors.torch.save_file"):
        read_eagle_spec(folder, target)


@pytest.mark.parametrize(
    ("options", "removed", "added", "named"),
    [
        ({"streams": 2}, (), {}, "fc.weight reads 64 numbers, but the 3 layers"),
        ({}, (), {"fc.bias": (32,)}, "fc.bias"),
        ({}, (), {"midlayer.self_attn.q_norm.weight": (8,)}, "q_norm"),
        ({}, (), {"layers.1.hidden_norm.weight": (32,)}, "layers.1"),
        ({}, ("midlayer.mlp.up_proj.weight",), {}, "up_proj"),
        ({"flags": ("fc_norm",)}, ("fc_norm.1.weight",), {}, "fc_norm.1"),
        ({"hidden": 24}, (), {}, "embed_tokens"),
        ({"targets": (3, 5)}, ("lm_head.weight",), {}, "lm_head"),
        ({"changes": {"tie_word_embeddings": True}}, ("lm_head.weight",), {}, "lm_head"),
        ({"targets": (3, 5)}, ("d2t",), {}, "d2t"),
        ({"targets": (3, 3)}, (), {}, "d2t"),
        ({"targets": (3, 50)}, (), {}, "d2t"),
        ({"targets": (3, 5)}, ("d2t",), {"d2t": (2,)}, "d2t"),
    ],
)
def test_refused_tensors(
    tmp_path: Path,
    target: ModelSpec,
    options: dict[str, Any],
    removed: tuple[str, ...],
    added: dict[str, tuple[int, ...]],
    named: str,
) -> None:
    folder = folder_of(**options)
    path = folder.write(tmp_path / "head")
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in folder.tensors().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in removed}
    save_file(tensors | {name: torch.ones(shape) for name, shape in added.items()}, path / "model.safetensors")
    model = load(path, target, load_format="dummy")
    assert isinstance(model, Decoder)
    with pytest.raises(UnsupportedModelError, match=named):
        load_eagle_head(path, read_eagle_spec(path, target), model, load_format="auto", seed=0)


def test_the_reader_does_not_load_torch() -> None:
    code = "import sys, roseinfer.models.eagle.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
