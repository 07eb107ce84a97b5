"""Readers of config.json fields that several encoders share, without torch."""

from collections.abc import Sequence
from typing import Any

from roseinfer.models.decoder_config import ACTIVATIONS, read_dtype
from roseinfer.models.encoders.spec import ScoreHead
from roseinfer.models.fields import ConfigFields

# Bookkeeping, training and special tokens that only tokenizers need: none of them changes hidden states or scores.
HARMLESS = frozenset(
    """
    architectures model_type torch_dtype dtype name_or_path tokenizer_class problem_type finetuning_task
    task_specific_params label2id prefix tf_legacy_loss use_bfloat16 torchscript return_dict
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id
    initializer_range initializer_cutoff_factor gradient_checkpointing chunk_size_feed_forward
    attention_probs_dropout_prob hidden_dropout_prob classifier_dropout attention_dropout embedding_dropout
    mlp_dropout tie_word_embeddings use_cache output_attentions output_hidden_states output_past
    """.split()  # noqa: SIM905
)
HARMLESS_PREFIXES = ("_", "transformers")
# Values of `layer_types`.
_FULL, _LOCAL = "full_attention", "sliding_attention"
# Functions that cross-encoders of sentence-transformers apply to their scores.
_SCORE_ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}


def read_shape(fields: ConfigFields, architecture: str, activation: str, default: str = "gelu") -> dict[str, Any]:
    """Return the arguments of `EncoderSpec` that all families read alike. activation, default: the name of that field,
    and its value if it is missing.

    Refuse decoders and two networks in one, which other fields of the same configs describe.
    """
    for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        fields.only(key, False)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        fields.refuse("num_attention_heads", heads, f"it does not divide hidden_size = {hidden}")
    return {
        "architecture": architecture,
        "num_layers": fields.num_layers(),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": fields.integer("vocab_size"),
        "activation": fields.choice(activation, ACTIVATIONS, default),
        "dtype": read_dtype(fields),
    }


def read_local_layers(fields: ConfigFields, usual: Sequence[bool]) -> tuple[bool, ...]:
    """Return whether each layer attends locally, from `layer_types`; `usual` without that field."""
    types, layers = fields.get("layer_types"), len(usual)
    if types is None:
        return tuple(usual)
    if not isinstance(types, list) or len(types) != layers or any(kind not in (_FULL, _LOCAL) for kind in types):
        fields.refuse("layer_types", types, f"a list of {layers} of {_FULL}, {_LOCAL} is needed")
    return tuple(kind == _LOCAL for kind in types)


def read_thetas(fields: ConfigFields, full: tuple[str, float], local: tuple[str, float]) -> tuple[float, float]:
    """Return the bases of the rotation in full and in local layers.

    They are in `rope_parameters` by kind of layer (transformers 5), or in older fields. full, local: names of these,
    and their defaults.
    """
    found = {_FULL: _theta(fields, *full), _LOCAL: _theta(fields, *local)}
    fields.only("rope_scaling", {}, hint="only unscaled rotation is")
    parameters = fields.inner("rope_parameters")
    if parameters is not None:
        for kind, default in found.items():
            rope = parameters.inner(kind)
            if rope is not None:
                rope.only("rope_type", "default", hint="only unscaled rotation is")
                found[kind] = _theta(rope, "rope_theta", default)
                rope.refuse_unread()
        parameters.refuse_unread()
    return found[_FULL], found[_LOCAL]


def _theta(fields: ConfigFields, key: str, default: float) -> float:
    theta = fields.number(key, default)
    # Versions disagree on a null: the other kind's theta, or an error.
    if theta < 1.0 or (key in fields and fields.get(key) is None):
        fields.refuse(key, fields.get(key), "a number of 1 or more is needed")
    return theta


def read_score_head(fields: ConfigFields, architecture: str, pooling: str) -> ScoreHead | None:
    """Return the head of an architecture that classifies rows; None for the others."""
    labels, activation = _labels(fields), _score_activation(fields)
    if not architecture.endswith("ForSequenceClassification"):
        return None
    default = "sigmoid" if labels == 1 else "identity"
    return ScoreHead(labels=labels, pooling=pooling, activation=activation or default)


def check_rotated(fields: ConfigFields, key: str, head_dim: int) -> None:
    """Refuse the field `key`, which makes heads of this width, if they cannot be rotated in pairs."""
    if head_dim % 2:
        fields.refuse(key, fields.get(key), "rotary positions need heads of an even width")


def _labels(fields: ConfigFields) -> int:
    """Return the number of labels. transformers writes their names, and assumes two without them."""
    names = fields.get("id2label")
    if names is None:
        return fields.integer("num_labels", 2)
    if not isinstance(names, dict) or not names:
        fields.refuse("id2label", names, "an object with a name for each label is needed")
    fields.only("num_labels", len(names), hint=f"id2label names {len(names)} labels")
    return len(names)


def _score_activation(fields: ConfigFields) -> str | None:
    """Return the activation of the scores that sentence-transformers wrote, in its newer or older field."""
    found = fields.choice("sbert_ce_default_activation_function", {"": "", **_SCORE_ACTIVATIONS}, "")
    inner = fields.inner("sentence_transformers")
    if inner is not None:
        inner.get("version")
        found = inner.choice("activation_fn", {"": "", **_SCORE_ACTIVATIONS}, found)
        inner.refuse_unread()
    return found or None
