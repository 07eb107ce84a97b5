"""Small random encoders, made and saved by transformers, and packed rows for them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from roseinfer.core.config.engine import ModelConfig
from roseinfer.models.encoders.base import EncoderModel, PackedRows
from roseinfer.models.encoders.loader import load_encoder
from roseinfer.models.encoders.registry import read_encoder_spec
from roseinfer.parallel.group import RankGroup
from tests.helpers.checkpoints import Kind, random_model

VOCAB = 97
# Rows of one token, neighbours of equal length, and others of equal length apart.
LENGTHS = (7, 1, 23, 23, 5, 40, 7, 1)
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_BERT = {**_SIZES, "pad_token_id": 0}
_XLM_R = {**_SIZES, "pad_token_id": 1, "type_vocab_size": 1}
_MODERNBERT = {
    **_SIZES,
    "num_hidden_layers": 4,
    "local_attention": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_GEMMA = {
    **_SIZES,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    "use_bidirectional_attention": True,
    "pad_token_id": 0,
}
_SCALED_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}

ENCODERS: dict[str, Kind] = {
    "bert": ("BertConfig", "BertModel", _BERT),
    "bert-tanh-gelu": ("BertConfig", "BertModel", {**_BERT, "hidden_act": "gelu_pytorch_tanh"}),
    "bert-masked": ("BertConfig", "BertForMaskedLM", _BERT),
    "xlm-r": ("XLMRobertaConfig", "XLMRobertaModel", _XLM_R),
    "roberta-masked": ("RobertaConfig", "RobertaForMaskedLM", _XLM_R),
    "modernbert": ("ModernBertConfig", "ModernBertModel", _MODERNBERT),
    "modernbert-biases": ("ModernBertConfig", "ModernBertModel", {**_MODERNBERT, **_BIASES}),
    "gemma3": ("Gemma3TextConfig", "Gemma3TextModel", _GEMMA),
    "gemma3-groups": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {**_GEMMA, "num_key_value_heads": 2, "rope_parameters": _SCALED_ROPE},
    ),
    "modernbert-masked": ("ModernBertConfig", "ModernBertForMaskedLM", _MODERNBERT),
}
RERANKERS: dict[str, Kind] = {
    "bert": ("BertConfig", "BertForSequenceClassification", {**_BERT, "num_labels": 1}),
    "bert-3": ("BertConfig", "BertForSequenceClassification", {**_BERT, "num_labels": 3}),
    "xlm-r": ("XLMRobertaConfig", "XLMRobertaForSequenceClassification", {**_XLM_R, "num_labels": 1}),
    "modernbert": ("ModernBertConfig", "ModernBertForSequenceClassification", {**_MODERNBERT, "num_labels": 1}),
    "modernbert-mean": (
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        {**_MODERNBERT, **_BIASES, "num_labels": 2, "classifier_pooling": "mean"},
    ),
}


def make_encoder(kind: Kind, **changes: Any) -> PreTrainedModel:
    return random_model(kind, seed=4321, **changes)


def load(
    folder: Path, dtype: str = "float32", device: str = "cpu", group: RankGroup | None = None, **options: Any
) -> EncoderModel:
    config = ModelConfig(dtype=dtype, **options)
    return load_encoder(folder, read_encoder_spec(folder), config, torch.device(device), group)


def draw_rows(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Return rows of these lengths, without the tokens of padding and the other special ones."""
    rng = random.Random(seed)
    return [rng.choices(range(4, VOCAB), k=length) for length in lengths]


def pack(
    rows: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]] | None = None,
    device: str | torch.device = "cpu",
) -> PackedRows:
    ids = torch.tensor([token for row in rows for token in row], device=device)
    kinds = None if types is None else torch.tensor([kind for row in types for kind in row], device=device)
    return PackedRows.of(ids, [len(row) for row in rows], kinds)


@torch.inference_mode()
def hidden_states(model: EncoderModel, rows: PackedRows) -> list[torch.Tensor]:
    """Return the hidden states [length, hidden] of each row, on the CPU."""
    return list(model.forward(rows).cpu().split(rows.query_lens))


@torch.inference_mode()
def reference_states(model: PreTrainedModel, row: Sequence[int], **inputs: Any) -> torch.Tensor:
    """Return the hidden states [length, hidden] of one row by transformers, computed alone."""
    return model.base_model(torch.tensor([row]), **inputs).last_hidden_state[0]
