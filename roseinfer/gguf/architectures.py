"""Fields of config.json by GGUF architecture, from the keys that llama.cpp's converter writes for it.

What the converter does not write, but llama.cpp's own model code assumes, is stated here too.
"""

from collections.abc import Callable
from typing import Any

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.metadata import MetadataFields
from roseinfer.gguf.rope import rope_parameters

EMBEDDING = "token_embd.weight"
_ROUTER_FUNCTIONS = {1: "softmax"}  # supported values of expert_gating_func
# Each so many-th layer does not rotate (SmolLM3), or has no window, if the file has no pattern.
_DEFAULT_ROPE_INTERVAL = 4
_DEFAULT_WINDOW_INTERVAL = 4
_DEFAULT_FULL_INTERVAL = 4  # each so many-th layer of a hybrid has attention
_DEFAULT_GEMMA3_WINDOW_INTERVAL = 6
# Layers of Gemma 3 27B, whose scores have another scale.
_GEMMA3_27B_LAYER_COUNT = 62
_MAX_LAYERS = 2**12  # files with more are refused when their config is read
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Sizes of layers that keep a state, and of experts, which Granite 4 states even without any. Their tensors are refused.
_UNUSED_GRANITE = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.time_step_rank",
    "expert_used_count",
)
_RMS_EPS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}

Config = dict[str, Any]


def _gpt2(keys: MetadataFields) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": keys.needed_integer("embedding_length"),
        "n_layer": keys.needed_integer("block_count"),
        "n_head": keys.needed_integer("attention.head_count"),
        "n_inner": keys.needed_integer("feed_forward_length"),
        "n_positions": keys.needed_integer("context_length"),
        "layer_norm_epsilon": keys.needed_number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "vocab_size": _rows(keys),
    }


def _llama(keys: MetadataFields) -> Config:
    if keys.integer("expert_count"):
        # Mixtral: the key for the width of feed-forward networks holds that of its experts.
        return {"architectures": ["MixtralForCausalLM"], **_experts(keys), **_decoder(keys)}
    return {"architectures": ["LlamaForCausalLM"], **_biases(keys, mlp=True), **_decoder(keys)}


def _qwen2(keys: MetadataFields) -> Config:
    return {"architectures": ["Qwen2ForCausalLM"], **_decoder(keys)}


def _qwen3(keys: MetadataFields) -> Config:
    return {"architectures": ["Qwen3ForCausalLM"], **_biases(keys), **_decoder(keys)}


def _qwen3_moe(keys: MetadataFields) -> Config:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_experts(keys),
        "moe_intermediate_size": keys.needed_integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        **_biases(keys),
        **_decoder(keys),
    }


def _phi3(keys: MetadataFields) -> Config:
    return {
        "architectures": ["Phi3ForCausalLM"],
        **_decoder(keys, partial=True),
        "original_max_position_embeddings": keys.needed_integer("rope.scaling.original_context_length"),
        "sliding_window": keys.needed_integer("attention.sliding_window") or None,
    }


def _smollm3(keys: MetadataFields) -> Config:
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        **_biases(keys, mlp=True),
        **_decoder(keys),
        "no_rope_layer_interval": _DEFAULT_ROPE_INTERVAL,
    }


def _granite(keys: MetadataFields) -> Config:
    if keys.flag("rope.scaling.finetuned") is False:
        keys.refuse("rope.scaling.finetuned", "it stands for Granite without rotary positions")
    if keys.integer("expert_count"):
        keys.refuse("expert_count", "Granite is supported without experts")
    for key in _UNUSED_GRANITE:
        keys.integer(key)
    config = {
        "architectures": ["GraniteForCausalLM"],
        **_biases(keys, mlp=True),
        **_decoder(keys),
        "attention_multiplier": keys.needed_number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale") or 1.0,
        "residual_multiplier": keys.number("residual_scale") or 1.0,
        "logits_scaling": keys.needed_number("logit_scale"),
    }
    # Granite 4 without experts: the network that all tokens share is the only one.
    width = keys.integer("expert_shared_feed_forward_length")
    return {**config, "intermediate_size": width} if width else config


def _olmo2(keys: MetadataFields) -> Config:
    """OLMo 2, or OLMo 3 if there are windows. Layers with a window have no scaling of their rotary positions."""
    config, window = _decoder(keys), keys.integer("attention.sliding_window")
    if not window:
        return {"architectures": ["Olmo2ForCausalLM"], **config}
    full = config["rope_parameters"]
    theta = keys.number("rope.freq_base_swa") or full["rope_theta"]
    return {
        "architectures": ["Olmo3ForCausalLM"],
        **config,
        "sliding_window": window,
        "layer_types": _layer_types(keys),
        "rope_parameters": {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": theta}},
    }


def _seed_oss(keys: MetadataFields) -> Config:
    return {
        "architectures": ["SeedOssForCausalLM"],
        **_biases(keys, mlp=True),
        "attention_out_bias": "blk.0.attn_output.bias" in keys.file.tensors,
        **_decoder(keys),
    }


def _exaone4(keys: MetadataFields) -> Config:
    window = keys.integer("attention.sliding_window") or None
    types = {"layer_types": _layer_types(keys)} if window else {}
    return {"architectures": ["Exaone4ForCausalLM"], **_decoder(keys), "sliding_window": window, **types}


def _glm4(keys: MetadataFields) -> Config:
    return {"architectures": ["Glm4ForCausalLM"], **_biases(keys), **_decoder(keys, partial=True)}


def _starcoder2(keys: MetadataFields) -> Config:
    """The file does not mention the window of published models."""
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "use_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        **_decoder(keys, eps={"norm_epsilon": "attention.layer_norm_epsilon"}),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
    }


def _cohere2(keys: MetadataFields) -> Config:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        **_decoder(keys, eps={"layer_norm_eps": "attention.layer_norm_epsilon"}),
        "logit_scale": keys.needed_number("logit_scale"),
        "sliding_window": keys.needed_integer("attention.sliding_window"),
        "layer_types": _layer_types(keys),
    }


def _ernie4_5(keys: MetadataFields) -> Config:
    bias = "blk.0.attn_q.bias" in keys.file.tensors
    return {"architectures": ["Ernie4_5ForCausalLM"], "use_bias": bias, **_decoder(keys)}


def _hunyuan_dense(keys: MetadataFields) -> Config:
    """The base of its rotary positions is stored with the effect of `alpha`."""
    return {"architectures": ["HunYuanDenseV1ForCausalLM"], **_biases(keys), **_decoder(keys)}


def _mistral3(keys: MetadataFields) -> Config:
    """Ministral 3 if queries are scaled by position, else Mistral without windows (Mistral Small 3)."""
    config, beta = _decoder(keys), keys.number("attention.temperature_scale")
    rope, key = config["rope_parameters"], "rope.scaling.yarn_log_multiplier"
    if (rope["rope_type"] == "yarn") != bool(beta):
        keys.refuse("rope.scaling.type", f"attention.temperature_scale is {beta}")
    if not beta:
        return {"architectures": ["MistralForCausalLM"], **config, "sliding_window": None}
    if keys.needed_number(key) != 1.0:
        keys.refuse(key, "only 1 is supported")
    scaling = {**rope, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta}
    return {"architectures": ["Ministral3ForCausalLM"], **config, "sliding_window": None, "rope_parameters": scaling}


def _gemma3(keys: MetadataFields) -> Config:
    """Files record neither the scale of scores nor, mostly, the theta of layers with a window."""
    config, window = _decoder(keys), keys.integer("attention.sliding_window") or None
    layers, theta = config["num_hidden_layers"], keys.number("rope.freq_base_swa") or 10000.0
    scalar = config["head_dim"]
    if layers == _GEMMA3_27B_LAYER_COUNT:
        scalar = config["hidden_size"] // max(1, config["num_attention_heads"])
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **_biases(keys),
        **config,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": _layer_types(keys, _DEFAULT_GEMMA3_WINDOW_INTERVAL)
        if window
        else [_FULL] * min(layers, _MAX_LAYERS),
        "rope_parameters": {
            _FULL: config["rope_parameters"],
            _SLIDING: {"rope_type": "default", "rope_theta": theta},
        },
        "final_logit_softcapping": keys.number("final_logit_softcapping") or None,
    }


def _gpt_oss(keys: MetadataFields) -> Config:
    """The file does not say whether YaRN's bounds are whole numbers; in published models they are not."""
    config = _decoder(keys)
    return {
        "architectures": ["GptOssForCausalLM"],
        **_experts(keys),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        **config,
        "intermediate_size": keys.needed_integer("expert_feed_forward_length"),
        "sliding_window": keys.needed_integer("attention.sliding_window"),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _qwen35(keys: MetadataFields) -> Config:
    return {"architectures": ["Qwen3_5ForCausalLM"], **_hybrid(keys)}


def _qwen35_moe(keys: MetadataFields) -> Config:
    keys.integer("feed_forward_length")  # no layer is dense
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_experts(keys),
        "moe_intermediate_size": keys.needed_integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.needed_integer("expert_shared_feed_forward_length"),
        **_hybrid(keys, width="expert_feed_forward_length"),
    }


def _hybrid(keys: MetadataFields, width: str = "feed_forward_length") -> Config:
    """Return the fields of a model of gated DeltaNet and attention. Blocks of a draft head, which come last, are not
    counted. width: key of the feed-forward networks' width.
    """
    keys.values("rope.dimension_sections")  # a text has the same position in each
    config, heads = _decoder(keys, partial=True, width=width), keys.needed_integer("ssm.time_step_rank")
    drafting, inner = keys.integer("nextn_predict_layers") or 0, keys.needed_integer("ssm.inner_size")
    if inner % max(1, heads):
        keys.refuse("ssm.inner_size", f"ssm.time_step_rank = {heads} does not divide it")
    full = next((name for name in keys.file.tensors if name.endswith("attn_q.bias")), None)
    return {
        **config,
        "attention_bias": full is not None,
        "num_hidden_layers": config["num_hidden_layers"] - drafting,
        "mtp_num_hidden_layers": drafting,
        "full_attention_interval": keys.integer("full_attention_interval") or _DEFAULT_FULL_INTERVAL,
        "linear_conv_kernel_dim": keys.needed_integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.needed_integer("ssm.state_size"),
        "linear_num_key_heads": keys.needed_integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // max(1, heads),
    }


def _experts(keys: MetadataFields) -> Config:
    """Return the fields of experts. llama.cpp always divides the chosen experts' weights by their sum."""
    if keys.flag("expert_weights_norm") is False:
        keys.refuse("expert_weights_norm")
    if keys.integer("expert_gating_func") not in (None, *_ROUTER_FUNCTIONS):
        keys.refuse("expert_gating_func", "only 1 (softmax) is supported")
    if keys.number("expert_weights_scale") not in (None, 0.0, 1.0):
        keys.refuse("expert_weights_scale")
    return {
        "num_local_experts": keys.needed_integer("expert_count"),
        "num_experts_per_tok": keys.needed_integer("expert_used_count"),
    }


def _biases(keys: MetadataFields, *, mlp: bool = False) -> Config:
    """Return whether linear layers have biases: only the tensors of the first layer show it."""
    found = {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}
    return {**found, "mlp_bias": "blk.0.ffn_up.bias" in keys.file.tensors} if mlp else found


def _layer_types(keys: MetadataFields, interval: int = _DEFAULT_WINDOW_INTERVAL) -> list[str]:
    """Return `layer_types` from a flag for each layer that has a window, or from the interval of those without.

    interval: that of files without the key.
    """
    key = "attention.sliding_window_pattern"
    found = keys.values(key) or [interval]
    if len(found) == 1 and type(found[0]) is int:
        if found[0] < 1:
            keys.refuse(key, "a positive integer is needed")
        layers = min(keys.needed_integer("block_count"), _MAX_LAYERS)
        found = [(layer + 1) % found[0] != 0 for layer in range(layers)]
    if any(flag not in (0, 1) for flag in found):
        keys.refuse(key, "true or false is needed for each layer")
    return [_SLIDING if windowed else _FULL for windowed in found]


def _decoder(
    keys: MetadataFields,
    *,
    eps: dict[str, str] = _RMS_EPS,
    partial: bool = False,
    width: str = "feed_forward_length",
) -> Config:
    """Return the fields that most architectures share.

    eps: the field of the norms' epsilon, and its key. partial: a part of each head may be rotated. width: key of the
    feed-forward networks' width.
    """
    hidden = keys.needed_integer("embedding_length")
    heads = keys.needed_integer("attention.head_count")
    head_dim = keys.integer("attention.key_length") or hidden // max(1, heads)
    rotated = keys.needed_integer("rope.dimension_count") if partial else head_dim
    for key in ("attention.value_length", *(() if partial else ("rope.dimension_count",))):
        if keys.integer(key) not in (None, head_dim):
            keys.refuse(key, f"the width of heads is {head_dim}")
    rope = rope_parameters(keys, rotated)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.needed_integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(keys) or heads,
        "head_dim": head_dim,
        "intermediate_size": keys.needed_integer(width),
        "max_position_embeddings": keys.needed_integer("context_length"),
        **{field: keys.needed_number(key) for field, key in eps.items()},
        "hidden_act": "silu",
        "rope_parameters": {**rope, "partial_rotary_factor": rotated / max(1, head_dim)} if partial else rope,
        "vocab_size": _rows(keys),
    }


def _kv_heads(keys: MetadataFields) -> int | None:
    """Return the KV heads of all layers. Files of hybrid architectures have a list of them."""
    key = "attention.head_count_kv"
    found = set(keys.values(key) or ())
    if len(found) > 1:
        keys.refuse(key, "the same number for all layers is needed")
    count = next(iter(found), None)
    if count is not None and type(count) is not int:
        keys.refuse(key, "one integer is needed")
    return count


def _rows(keys: MetadataFields) -> int:
    """Return the vocabulary size of the logits; the tokenizer's may be smaller."""
    if EMBEDDING not in keys.file.tensors:
        raise UnsupportedModelError(f"{keys.file.path}: tensor {EMBEDDING} is missing")
    return keys.file.tensors[EMBEDDING].shape[0]


READERS: dict[str, Callable[[MetadataFields], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "starcoder2": _starcoder2,
    "cohere2": _cohere2,
    "ernie4_5": _ernie4_5,
    "hunyuan-dense": _hunyuan_dense,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gpt-oss": _gpt_oss,
}
