"""Reader of sentence-transformers folders, and the choice between generation and pooling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.core.pooling import PairFormat, PoolingMethod, PoolingTask
from roseinfer.models.pooling.config import read_pooling_spec
from roseinfer.models.pooling.heads import DenseLayer
from tests.helpers.sentence_folders import add_modules, write_json

IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"architectures": ["Qwen3ForCausalLM"]})
    write_json(tmp_path / "tokenizer.json", {"model": {"vocab": {"yes": 9, "no": 4}}})
    return tmp_path


def edited(path: Path, **values: Any) -> None:
    write_json(path, json.loads(path.read_text()) | values)


def test_a_plain_model_generates_unless_the_options_ask_for_vectors(folder: Path) -> None:
    assert read_pooling_spec(folder) is None
    spec = read_pooling_spec(folder, runner="pooling")
    assert (spec.task, spec.method, spec.normalized) == (PoolingTask.EMBED, PoolingMethod.LAST, True)
    assert read_pooling_spec(folder, pooling="mean").method is PoolingMethod.MEAN


def test_modules_choose_pooling_unless_the_options_ask_for_text(folder: Path) -> None:
    add_modules(folder, {"pooling_mode": "mean"}, max_seq_length=77, prompts={"query": "q: ", "document": ""})
    spec = read_pooling_spec(folder)
    assert (spec.method, spec.max_tokens, spec.normalized) == (PoolingMethod.MEAN, 77, True)
    assert spec.info(32).prompts == {"query": "q: ", "document": ""}
    assert read_pooling_spec(folder, runner="generate") is None
    assert read_pooling_spec(folder, pooling="last").method is PoolingMethod.LAST


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, PoolingMethod.LAST),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8, "include_prompt": True}, PoolingMethod.CLS),
        ({"pooling_mode": ["mean"]}, PoolingMethod.MEAN),
        ({"word_embedding_dimension": 8}, PoolingMethod.MEAN),
    ],
)
def test_both_spellings_of_the_method_are_read(folder: Path, pooling: dict, method: PoolingMethod) -> None:
    assert read_pooling_spec(add_modules(folder, pooling, normalize=False)).method is method
    assert not read_pooling_spec(folder).normalized


@pytest.mark.parametrize(
    ("pooling", "error"),
    [
        ({"pooling_mode": "max"}, "pooling_mode = 'max' is not supported; known: lasttoken, mean, cls"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            r"pooling_mode = \['mean', 'cls'\] is not",
        ),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    ],
)
def test_other_methods_are_refused_by_name(folder: Path, pooling: dict, error: str) -> None:
    add_modules(folder, pooling)
    with pytest.raises(UnsupportedModelError, match=error):
        read_pooling_spec(folder)


@pytest.mark.parametrize(
    ("modules", "error"),
    [
        (
            [{"type": "sentence_transformers.models.LSTM"}],
            r"type = 'sentence_transformers.models.LSTM' is not supported",
        ),
        ([{"type": "custom.Transformer"}], "type = 'custom.Transformer' is not supported"),
        ([{"type": "sentence_transformers.models.Normalize"}], "first module must be a Transformer"),
        (
            [{"type": "sentence_transformers.models.Transformer"}],
            r"modules Transformer \(expected Transformer, Pooling",
        ),
        ([{"type": "sentence_transformers.models.Transformer", "path": "../x"}], "path = '../x' is not a folder"),
        ({}, "not a list of modules"),
        ([1], "not a list of modules"),
    ],
)
def test_other_modules_are_refused_by_name(folder: Path, modules: object, error: str) -> None:
    write_json(folder / "modules.json", modules)
    with pytest.raises(UnsupportedModelError, match=error):
        read_pooling_spec(folder)


@pytest.mark.parametrize(
    ("file", "values", "error"),
    [
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Hardswish"}, "Hardswish.* is not"),
        ("2_Dense/config.json", {"activation_function": "os.Tanh"}, "'os.Tanh' is not supported"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual is not supported"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("2_Dense/config.json", {"in_features": 0}, "in_features"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is not supported"),
        ("sentence_bert_config.json", {"max_seq_length": "8"}, "max_seq_length"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name = 'x'"),
        ("config_sentence_transformers.json", {"prompts": ["x"]}, "prompts"),
        ("config.json", {"matryoshka_dimensions": 8}, "matryoshka_dimensions"),
    ],
)
def test_settings_that_would_change_the_result_are_refused(folder: Path, file: str, values: dict, error: str) -> None:
    dense = ((torch.zeros(4, 8), None, IDENTITY),)
    add_modules(folder, {"pooling_mode": "mean"}, dense=dense, max_seq_length=8, prompts={})
    edited(folder / file, **values)
    with pytest.raises(UnsupportedModelError, match=error):
        read_pooling_spec(folder)


def test_smaller_dimensions_come_from_the_config_or_the_family(folder: Path) -> None:
    add_modules(folder, {"pooling_mode": "mean"})
    info = read_pooling_spec(folder, "org/other").info(64)
    assert (info.dimensions, info.any_dimension_from) == ((), 0)
    assert read_pooling_spec(folder, "Qwen/Qwen3-Embedding-0.6B").info(64).any_dimension_from == 32
    edited(folder / "config.json", matryoshka_dimensions=[64, 16, 32])
    assert read_pooling_spec(folder).info(64).dimensions == (16, 32)


def test_a_reranker_is_known_by_its_name_its_modules_or_the_option(folder: Path) -> None:
    assert read_pooling_spec(folder, "org/Qwen3-Reranker-0.6B", runner="generate") is None
    for spec in (read_pooling_spec(folder, "org/Qwen3-Reranker-0.6B"), read_pooling_spec(folder, pooling="yes-no")):
        assert (spec.task, spec.yes_no, spec.pairs) == (PoolingTask.SCORE, (9, 4), PairFormat.QWEN3_RERANKER)
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": 7, "false_token_id": 5})
    modules = [
        {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
        {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"},
    ]
    write_json(folder / "modules.json", modules)
    assert read_pooling_spec(folder).yes_no == (7, 5)
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"yes": 9}}})
    with pytest.raises(UnsupportedModelError, match="no token 'no'"):
        read_pooling_spec(folder, pooling="yes-no")


def test_dense_weights_must_have_the_shape_of_the_config(folder: Path) -> None:
    add_modules(folder, {"pooling_mode": "mean"}, dense=((torch.zeros(4, 8), torch.zeros(4), IDENTITY),))
    edited(folder / "2_Dense" / "config.json", out_features=5)
    (spec,) = read_pooling_spec(folder).dense
    with pytest.raises(UnsupportedModelError, match=r"linear.weight': \[4, 8\].*config.json says .*\[5, 8\]"):
        DenseLayer.load(spec, torch.device("cpu"))
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UnsupportedModelError, match="not a safetensors file"):
        DenseLayer.load(spec, torch.device("cpu"))
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no model\.safetensors"):
        DenseLayer.load(spec, torch.device("cpu"))
