"""What a checkpoint's config.json, or its GGUF file, says of the model, read without torch.

Every field is read, known to be harmless, or refused by name: a field that roseinfer has never heard of and that is
set (not null, false, zero or empty) may change the result, and a wrong answer is worse than none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.json_file import shortened
from roseinfer.models.documents import CONFIG, place_of, read_config, weight_bytes
from roseinfer.models.experts import ExpertsSpec, read_dense_layers, read_experts
from roseinfer.models.fields import Fields
from roseinfer.models.quantization import read_quantization
from roseinfer.quant.fp8_scheme import Fp8Scheme

# A layer more costs time even if it is empty.
MAX_LAYERS = 2**12
# Weights that a byte of a checkpoint may hold, in the densest format there is.
MAX_WEIGHTS_PER_BYTE = 8

DTYPES = ("float32", "bfloat16", "float16")

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Book-keeping, training, other tasks' heads and generation defaults: none of it changes the logits.
_HARMLESS = frozenset(
    """
    architectures model_type torch_dtype dtype name_or_path tokenizer_class problem_type finetuning_task
    task_specific_params id2label label2id num_labels prefix tf_legacy_loss use_bfloat16 torchscript
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop gradient_checkpointing
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    use_cache output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    is_decoder chunk_size_feed_forward pretraining_tp n_ctx use_flash_attn attn_implementation
    predict_special_tokens output_past max_sequence_length is_llama_config neftune_noise_alpha
    do_sample temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size max_length min_length max_new_tokens min_new_tokens
    num_beams num_beam_groups num_return_sequences diversity_penalty early_stopping bad_words_ids
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    exponential_decay_length_penalty remove_invalid_values
    output_router_logits router_aux_loss_coef router_jitter_noise
    """.split()  # noqa: SIM905
)
_HARMLESS_PREFIXES = ("_", "transformers", "unsloth")

# Values of `layer_types`.
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding.

    `scaling` is "default" (none), "linear" (positions divided by `factor`) or "llama3" (wavelengths that are long
    against `original_max_position` tokens are stretched by `factor`, see attention/heads.py).
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape and options of a decoder-only model.

    `max_position` is the longest context in tokens. `activation` is "silu", "gelu" (exact) or "gelu_tanh". `rope` is
    None for learned positions. `dtype` is the checkpoint's. `qk_norm`: RMSNorm over each head of q and k. `windows`: of
    each layer's attention, in tokens, None for full attention; empty if no layer has one. `quantization`: how the
    checkpoint's linear layers are kept, None in floats. `experts`: of the layers that have them, None if none has;
    `intermediate_size` is that of the dense layers.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    activation: str
    rope: RopeSpec | None
    tied_embeddings: bool
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    quantization: Fp8Scheme | None = None
    experts: ExpertsSpec | None = None

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """What each layer's attention computes, in the order of the layers."""
        return tuple(
            AttentionSpec(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                window=window,
            )
            for window in self.windows or (None,) * self.num_layers
        )


def read_model_spec(folder: Path, max_model_len: int | None = None) -> ModelSpec:
    """The spec of the checkpoint in `folder`.

    `max_model_len` is the context that will be used: a sliding window at least that long is full attention.
    Raises `ModelNotFoundError` without a config.json, `UnsupportedModelError` naming what is not supported.
    """
    path = place_of(folder, CONFIG)
    data = read_config(folder)
    architecture = _architecture(data, str(path))
    fields = Fields(data, f"{path} ({architecture})")
    spec = _READERS[architecture](fields, architecture, max_model_len)
    spec = replace(spec, quantization=read_quantization(fields, folder))
    fields.refuse_unread(_HARMLESS, _HARMLESS_PREFIXES)
    if spec.num_layers > MAX_LAYERS:
        raise UnsupportedModelError(f"{fields.where}: {spec.num_layers} layers are not supported; at most {MAX_LAYERS}")
    _check_size(spec, folder, fields.where)
    return spec


def _check_size(spec: ModelSpec, folder: Path, where: str) -> None:
    """Raises `UnsupportedModelError` if the config speaks of far more weights than the checkpoint's files could hold:
    before memory is asked for them.
    """
    held = weight_bytes(folder)
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    dense = spec.num_layers - spec.expert_layers
    feed_forward = 2 * spec.intermediate_size * dense
    if spec.experts is not None:
        feed_forward += spec.experts.count * (1 + 3 * spec.experts.width) * spec.expert_layers
    weights = spec.hidden_size * (spec.vocab_size + spec.num_layers * attention + feed_forward)
    if held and weights > held * MAX_WEIGHTS_PER_BYTE:
        sizes = f"a model of {weights:.3g} weights, the checkpoint's files hold {held:.3g} bytes"
        raise UnsupportedModelError(f"{where} describes {sizes}")


def _architecture(data: dict[str, Any], where: str) -> str:
    names = data.get("architectures")
    # `in` a list: names that cannot be hashed are none of them.
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_READERS):
        known = ", ".join(_READERS)
        raise UnsupportedModelError(f"{where}: architectures = {shortened(names)} is not supported; known: {known}")
    return names[0]


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(key, {name: name for name in DTYPES}, "float32")


def _gpt2(fields: Fields, architecture: str, max_model_len: int | None) -> ModelSpec:
    fields.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        fields.only(key, False)
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    if hidden % heads:
        fields.refuse("n_head", heads, f"it does not divide n_embd = {hidden}")
    return ModelSpec(
        architecture=architecture,
        num_layers=fields.integer("n_layer"),
        hidden_size=hidden,
        intermediate_size=fields.integer("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("n_positions"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.choice("activation_function", _ACTIVATIONS, "gelu_new"),
        rope=None,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        dtype=_dtype(fields),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def _llama(fields: Fields, architecture: str, max_model_len: int | None) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        _windows(fields, None, 0, max_model_len),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields, architecture: str, max_model_len: int | None) -> ModelSpec:
    # Left out, the window is 4096: the default of transformers' MistralConfig. All layers have it.
    window = _optional_integer(fields, "sliding_window", 4096)
    return _decoder(fields, architecture, _one_window(fields, window, max_model_len, "Mistral"))


def _qwen2(fields: Fields, architecture: str, max_model_len: int | None) -> ModelSpec:
    return _decoder(fields, architecture, _qwen_windows(fields, max_model_len), qkv_bias=True)


def _qwen3(fields: Fields, architecture: str, max_model_len: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    windows = _qwen_windows(fields, max_model_len)
    return _decoder(fields, architecture, windows, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _qwen3_moe(fields: Fields, architecture: str, max_model_len: int | None) -> ModelSpec:
    fields.need("num_key_value_heads")  # left out, they are 4 in transformers
    fields.only("use_qk_norm", True)
    fields.only("qkv_bias", False, hint="attention_bias says whether there are biases")
    bias = fields.flag("attention_bias", False)
    window = _optional_integer(fields, "sliding_window", 4096)
    _optional_integer(fields, "max_window_layers", 0)  # all layers have the window, or none
    window = window if fields.flag("use_sliding_window", False) else None
    windows = _one_window(fields, window, max_model_len, "Qwen3-MoE")
    experts = read_experts(
        fields,
        width=fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", False),
        dense_layers=read_dense_layers(fields),
    )
    options: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "experts": experts}
    return _decoder(fields, architecture, windows, **options)


def _mixtral(fields: Fields, architecture: str, max_model_len: int | None) -> ModelSpec:
    # Left out, they have other defaults than their relatives'.
    fields.need("num_key_value_heads", "rms_norm_eps")
    if fields.get("rope_parameters") is None:
        fields.need("rope_theta")
    windows = _one_window(fields, _optional_integer(fields, "sliding_window", None), max_model_len, "Mixtral")
    experts = read_experts(fields, width=fields.integer("intermediate_size"), renormalise=True, dense_layers=())
    return _decoder(fields, architecture, windows, experts=experts)


def _qwen_windows(fields: Fields, max_model_len: int | None) -> tuple[int | None, ...]:
    """Qwen configs carry a window even when `use_sliding_window` turns it off. Else, later layers have it."""
    window = _optional_integer(fields, "sliding_window", 4096)
    first = _optional_integer(fields, "max_window_layers", 28) or 0
    return _windows(fields, window if fields.flag("use_sliding_window", False) else None, first, max_model_len)


def _windows(fields: Fields, window: int | None, first: int, max_model_len: int | None) -> tuple[int | None, ...]:
    """Of each layer, for `ModelSpec.windows`: layers from `first` on have the window, unless `layer_types` says which.

    A window that covers the context that will be used hides nothing, and is none.
    """
    if window == 0:
        fields.refuse("sliding_window", window, "a positive integer or null is needed")
    types = fields.get("layer_types")
    if window is None and not types:
        return ()
    layers = fields.integer("num_hidden_layers")
    types = types or [_SLIDING if window and layer >= first else _FULL for layer in range(layers)]
    known = (_FULL, _SLIDING) if window else (_FULL,)
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        fields.refuse("layer_types", types, f"a list of {layers} of {', '.join(known)} is needed")
    longest = fields.integer("max_position_embeddings")
    if window is None or window >= min(longest, max_model_len or longest):
        return ()
    windows = tuple(window if kind == _SLIDING else None for kind in types)
    return windows if any(windows) else ()


def _one_window(fields: Fields, window: int | None, max_model_len: int | None, family: str) -> tuple[int | None, ...]:
    """As `_windows`, of a family whose layers all have the window."""
    windows = _windows(fields, window, 0, max_model_len)
    if len(set(windows)) > 1:
        fields.refuse("layer_types", fields.get("layer_types"), f"{family}'s layers have one window")
    return windows


def _optional_integer(fields: Fields, key: str, default: int | None) -> int | None:
    """A number of tokens or layers from 0 on, or null; `default` if the field is left out."""
    value = fields.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        fields.refuse(key, value, "an integer of at least 0, or null, is needed")
    return value


def _decoder(fields: Fields, architecture: str, windows: tuple[int | None, ...], **options: Any) -> ModelSpec:
    """Llama and its relatives: RMSNorm, rotary positions, gated MLP, grouped KV heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads = {heads}")
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "rotary embedding needs an even one")
    return ModelSpec(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", _ACTIVATIONS, "silu"),
        rope=_rope(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields),
        windows=windows,
        **options,
    )


def _rope(fields: Fields) -> RopeSpec:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    theta = fields.number("rope_theta", 10000.0)
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    data = fields.get(key) or {}
    if not isinstance(data, dict):
        fields.refuse(key, data)
    inner = Fields(data, f"{fields.where} {key}")
    # `type` is the older name; transformers keeps it when it adds the newer one.
    older = inner.get("type")
    kind = inner.get("rope_type") or older or "default"
    if kind not in list(_ROPE_FIELDS):
        inner.refuse("rope_type", kind, f"known: {', '.join(_ROPE_FIELDS)}")
    if older not in (None, kind):
        inner.refuse("type", older, f"rope_type is {kind}")
    for holder in (fields, inner):
        if holder.get("partial_rotary_factor") not in (None, 1.0):
            holder.refuse("partial_rotary_factor", holder.get("partial_rotary_factor"))
    values = {ours: inner.number(theirs) for theirs, ours in _ROPE_FIELDS[kind].items()}
    spec = RopeSpec(theta=inner.number("rope_theta", theta), scaling=kind, **values)
    if spec.theta < 1.0:
        (inner if "rope_theta" in inner else fields).refuse("rope_theta", spec.theta, "a number of 1 or more is needed")
    if kind == "llama3" and spec.high_freq_factor <= spec.low_freq_factor:
        hint = f"more than low_freq_factor = {spec.low_freq_factor} is needed"
        inner.refuse("high_freq_factor", spec.high_freq_factor, hint)
    inner.refuse_unread()
    return spec


_ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
}

_Reader = Callable[[Fields, str, int | None], ModelSpec]
_READERS: dict[str, _Reader] = {
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
}
