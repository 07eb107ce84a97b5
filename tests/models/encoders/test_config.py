"""Configs of encoders: those of published models are read, and what may change a result is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.encoders.bert import BertSpec
from roseinfer.models.encoders.gemma3 import Gemma3Spec
from roseinfer.models.encoders.modernbert import ModernBertSpec
from roseinfer.models.encoders.registry import is_encoder, read_encoder_spec
from roseinfer.models.encoders.spec import EncoderSpec, ScoreHead
from tests.models.test_hostile_files import check_mutations

MINILM: dict[str, Any] = {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.8.2",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
BGE_LARGE = {
    **MINILM,
    "classifier_dropout": None,
    "hidden_size": 1024,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 4096,
    "label2id": {"LABEL_0": 0},
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "torch_dtype": "float32",
}
MS_MARCO = {
    **MINILM,
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0.dev0"},
}
E5 = {
    "architectures": ["XLMRobertaModel"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "classifier_dropout": None,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "xlm-roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.27.3",
    "type_vocab_size": 1,
    "use_cache": True,
    "vocab_size": 250002,
}
BGE_RERANKER = {
    **E5,
    "architectures": ["XLMRobertaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "max_position_embeddings": 8194,
}
MODERNBERT = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "reference_compile": True,
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "vocab_size": 50368,
}
EMBEDDING_GEMMA = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4,
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 24,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "transformers_version": "4.57.0.dev0",
    "use_bidirectional_attention": True,
    "use_cache": True,
    "vocab_size": 262144,
}
FULL, LOCAL = "full_attention", "sliding_attention"


def read(folder: Path, config: dict[str, Any]) -> EncoderSpec:
    (folder / "config.json").write_text(json.dumps(config))
    assert is_encoder(folder)
    return read_encoder_spec(folder)


@pytest.mark.parametrize("config", [MINILM, BGE_LARGE])
def test_bert(tmp_path: Path, config: dict[str, Any]) -> None:
    spec = read(tmp_path, config)
    assert isinstance(spec, BertSpec)
    assert (spec.max_length, spec.first_position, spec.token_types, spec.head) == (512, 0, 2, None)
    assert (spec.norm_eps, spec.activation, spec.dtype) == (1e-12, "gelu", "float32")


def test_xlm_roberta_has_fewer_positions_than_rows_in_its_table(tmp_path: Path) -> None:
    spec = read(tmp_path, E5)
    assert isinstance(spec, BertSpec)
    assert (spec.max_length, spec.first_position, spec.token_types, spec.head) == (512, 2, 1, None)


def test_rerankers(tmp_path: Path) -> None:
    assert read(tmp_path, BGE_RERANKER).head == ScoreHead(labels=1, pooling="cls", activation="sigmoid")
    # This one's authors take the logit as the score.
    assert read(tmp_path, MS_MARCO).head == ScoreHead(labels=1, pooling="cls", activation="identity")
    two = {**BGE_RERANKER, "id2label": {"0": "no", "1": "yes"}}
    assert read(tmp_path, two).head == ScoreHead(labels=2, pooling="cls", activation="identity")


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"sentence_transformers": {"version": "5.0"}}, "sigmoid"),
    ],
)
def test_activation_of_scores(fields: dict[str, Any], activation: str, tmp_path: Path) -> None:
    head = read(tmp_path, {**BGE_RERANKER, **fields}).head
    assert head is not None and head.activation == activation


def test_modernbert(tmp_path: Path) -> None:
    spec = read(tmp_path, MODERNBERT)
    assert isinstance(spec, ModernBertSpec)
    assert spec.local == tuple(layer % 3 != 0 for layer in range(22))
    assert (spec.reach, spec.full_theta, spec.local_theta, spec.max_length) == (64, 160000.0, 10000.0, 8192)
    assert spec.head is None
    head = read(tmp_path, {**MODERNBERT, "architectures": ["ModernBertForSequenceClassification"]}).head
    assert head == ScoreHead(labels=2, pooling="mean", activation="identity")


def test_both_spellings_of_modernbert(tmp_path: Path) -> None:
    """Compare the hub's fields with those that transformers 5 writes."""
    older = {**MODERNBERT, "global_rope_theta": 5000.0, "local_rope_theta": 300.0}
    newer = {key: value for key, value in MODERNBERT.items() if "rope_theta" not in key and "global_attn" not in key}
    newer["layer_types"] = [LOCAL if layer % 3 else FULL for layer in range(22)]
    newer["rope_parameters"] = {
        FULL: {"rope_type": "default", "rope_theta": 5000.0},
        LOCAL: {"rope_type": "default", "rope_theta": 300.0},
    }
    assert read(tmp_path, older) == read(tmp_path, newer)


def test_embedding_gemma(tmp_path: Path) -> None:
    spec = read(tmp_path, EMBEDDING_GEMMA)
    assert isinstance(spec, Gemma3Spec)
    assert spec.attention == AttentionSpec(heads=3, kv_heads=1, head_dim=256, scale=1 / 16)
    assert (spec.head_dim, spec.max_length, spec.reach, spec.activation) == (256, 2048, 256, "gelu_tanh")
    assert (spec.full_rope, spec.local_rope) == (RopeSpec(theta=1e6), RopeSpec(theta=1e4))
    assert spec.local == tuple(layer % 6 != 5 for layer in range(24))
    del (without := dict(EMBEDDING_GEMMA))["layer_types"]
    assert read(tmp_path, without) == spec


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (MINILM, "position_embedding_type", "relative_key"),
        (MINILM, "is_decoder", True),
        (MINILM, "add_cross_attention", True),
        (MINILM, "hidden_act", "relu"),
        (MINILM, "pruned_heads", {"0": [1]}),
        (MINILM, "num_attention_heads", 7),
        (MINILM, "quantization_config", {"quant_method": "fp8"}),
        (E5, "pad_token_id", -1),
        (E5, "max_position_embeddings", 2),
        (MS_MARCO, "sbert_ce_default_activation_function", "torch.nn.modules.activation.Tanh"),
        (MS_MARCO, "sentence_transformers", {"activation_fn": "x.Y"}),
        (MS_MARCO, "id2label", []),
        (MODERNBERT, "layer_types", [FULL]),
        (MODERNBERT, "layer_types", ["linear_attention"] * 22),
        (MODERNBERT, "local_rope_theta", None),
        (MODERNBERT, "rope_scaling", {"type": "yarn"}),
        (MODERNBERT, "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        (MODERNBERT, "rope_parameters", {FULL: {"rope_type": "yarn", "rope_theta": 1e6}}),
        (MODERNBERT, "classifier_pooling", "max"),
        (MODERNBERT, "sliding_window", 64),
        (EMBEDDING_GEMMA, "use_bidirectional_attention", False),
        (EMBEDDING_GEMMA, "attn_logit_softcapping", 50.0),
        (EMBEDDING_GEMMA, "attention_bias", True),
        (EMBEDDING_GEMMA, "num_key_value_heads", 2),
        (EMBEDDING_GEMMA, "head_dim", 255),
    ],
)
def test_what_changes_a_result_is_refused_by_name(tmp_path: Path, config: dict[str, Any], key: str, value: Any) -> None:
    inner = {"sentence_transformers": "activation_fn", "rope_parameters": "rope_type"}
    with pytest.raises(UnsupportedModelError, match=inner.get(key, key)):
        read(tmp_path, {**config, key: value})


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("MPNetModel", "relative positions"), ("DistilBertModel", "tensors"), ("NomicBertModel", "code")],
)
def test_relatives_are_refused_by_name(tmp_path: Path, architecture: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*{reason}"):
        read(tmp_path, {**MINILM, "architectures": [architecture]})


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], ["BertModel", "BertModel"], [], None, [[]], {}])
def test_other_architectures_are_no_encoders(tmp_path: Path, names: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MINILM, "architectures": names}))
    assert not is_encoder(tmp_path)
    with pytest.raises(UnsupportedModelError, match="architectures"):
        read_encoder_spec(tmp_path)


def test_more_weights_than_the_files_hold(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(UnsupportedModelError, match="describes"):
        read(tmp_path, MINILM)


@pytest.mark.parametrize("config", [MS_MARCO, BGE_RERANKER, MODERNBERT, EMBEDDING_GEMMA])
def test_mutated_configs(tmp_path: Path, config: dict[str, Any]) -> None:
    check_mutations(config, tmp_path, read_encoder_spec, seed=0)
