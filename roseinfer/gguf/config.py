"""config.json and generation_config.json of the model in a GGUF file, built from its metadata.

The readers of other checkpoints' configs read these documents too, so one place decides what is supported. A metadata
key that is set and not read here is refused by name.
"""

from collections.abc import Callable
from typing import Any

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.metadata import MetadataFields
from roseinfer.gguf.reader import GgufFile
from roseinfer.gguf.rope import rope_parameters
from roseinfer.gguf.tokens import read_vocabulary

# Keys after the architecture's name that do not change the result, or repeat other keys.
_HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
)
_ROUTER_FUNCTIONS = {1: "softmax"}  # supported values of expert_gating_func
_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
# general.sampling.X and its field in generation_config.json.
_SAMPLING = {"top_p": "top_p", "min_p": "min_p", "temp": "temperature", "penalty_repeat": "repetition_penalty"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json. Raise `UnsupportedModelError` naming what is missing or not supported."""
    fields = MetadataFields(file)
    kind = fields.text("general.type")
    if kind not in (None, "model"):
        fields.refuse("general.type", "only whole models are")
    arch = fields.needed_text("general.architecture")
    if arch not in _READERS:
        fields.refuse("general.architecture", f"known: {', '.join(_READERS)}")
    config = _READERS[arch](file, fields, arch)
    if fields.flag(f"{arch}.attention.causal") is False:
        fields.refuse(f"{arch}.attention.causal")
    fields.refuse_unread(f"{arch}.", _HARMLESS)
    vocabulary = read_vocabulary(file)
    if len(vocabulary.texts) > config["vocab_size"]:
        tokens, rows = len(vocabulary.texts), config["vocab_size"]
        raise UnsupportedModelError(f"{file.path}: {tokens} tokens, but {_EMBEDDING} has {rows} rows")
    return {
        **config,
        "tie_word_embeddings": _HEAD not in file.tensors,
        "dtype": _dtype(file),
        "eos_token_id": list(vocabulary.endings),
    }


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """Return generation_config.json; empty if the file proposes no sampling."""
    fields = MetadataFields(file)
    found: dict[str, Any] = {ours: fields.number(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    found["top_k"] = fields.integer("general.sampling.top_k")
    proposed = {name: value for name, value in found.items() if value is not None}
    return {"do_sample": True, **proposed} if proposed else {}


def _dtype(file: GgufFile) -> str:
    """Return the matrices' dtype. Quantised ones use bfloat16, whose range covers scales and activations."""
    encodings = {tensor.encoding.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if encodings <= {"F32"}:
        return "float32"
    return "float16" if encodings <= {"F32", "F16"} else "bfloat16"


def _rows(file: GgufFile) -> int:
    """Return the vocabulary size of the logits; the tokenizer's may be smaller."""
    if _EMBEDDING not in file.tensors:
        raise UnsupportedModelError(f"{file.path}: tensor {_EMBEDDING} is missing")
    return file.tensors[_EMBEDDING].shape[0]


def _gpt2(file: GgufFile, fields: MetadataFields, arch: str) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": fields.needed_integer(f"{arch}.embedding_length"),
        "n_layer": fields.needed_integer(f"{arch}.block_count"),
        "n_head": fields.needed_integer(f"{arch}.attention.head_count"),
        "n_inner": fields.needed_integer(f"{arch}.feed_forward_length"),
        "n_positions": fields.needed_integer(f"{arch}.context_length"),
        "layer_norm_epsilon": fields.needed_number(f"{arch}.attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "vocab_size": _rows(file),
    }


def _llama(file: GgufFile, fields: MetadataFields, arch: str) -> dict[str, Any]:
    if fields.integer(f"{arch}.expert_count"):
        # Mixtral: the key for the width of feed-forward networks holds that of its experts.
        return {"architectures": ["MixtralForCausalLM"], **_experts(fields, arch), **_decoder(file, fields, arch)}
    return {"architectures": ["LlamaForCausalLM"], **_biases(file, mlp=True), **_decoder(file, fields, arch)}


def _qwen2(file: GgufFile, fields: MetadataFields, arch: str) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], **_decoder(file, fields, arch)}


def _qwen3(file: GgufFile, fields: MetadataFields, arch: str) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], **_biases(file, mlp=False), **_decoder(file, fields, arch)}


def _qwen3_moe(file: GgufFile, fields: MetadataFields, arch: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_experts(fields, arch),
        "moe_intermediate_size": fields.needed_integer(f"{arch}.expert_feed_forward_length"),
        "norm_topk_prob": True,
        **_biases(file, mlp=False),
        **_decoder(file, fields, arch),
    }


def _experts(fields: MetadataFields, arch: str) -> dict[str, Any]:
    """Return the fields of experts. llama.cpp always divides the chosen experts' weights by their sum."""
    if fields.flag(f"{arch}.expert_weights_norm") is False:
        fields.refuse(f"{arch}.expert_weights_norm")
    if fields.integer(f"{arch}.expert_gating_func") not in (None, *_ROUTER_FUNCTIONS):
        fields.refuse(f"{arch}.expert_gating_func", "only 1 (softmax) is supported")
    if fields.number(f"{arch}.expert_weights_scale") not in (None, 0.0, 1.0):
        fields.refuse(f"{arch}.expert_weights_scale")
    return {
        "num_local_experts": fields.needed_integer(f"{arch}.expert_count"),
        "num_experts_per_tok": fields.needed_integer(f"{arch}.expert_used_count"),
    }


def _biases(file: GgufFile, *, mlp: bool) -> dict[str, Any]:
    """Return whether linear layers have biases: only the tensors of the first layer show it."""
    found = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    return {**found, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors} if mlp else found


def _decoder(file: GgufFile, fields: MetadataFields, arch: str) -> dict[str, Any]:
    hidden = fields.needed_integer(f"{arch}.embedding_length")
    heads = fields.needed_integer(f"{arch}.attention.head_count")
    head_dim = fields.integer(f"{arch}.attention.key_length") or hidden // max(1, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(f"{arch}.{key}") not in (None, head_dim):
            fields.refuse(f"{arch}.{key}", f"the width of heads is {head_dim}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": fields.needed_integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(f"{arch}.attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": fields.needed_integer(f"{arch}.feed_forward_length"),
        "max_position_embeddings": fields.needed_integer(f"{arch}.context_length"),
        "rms_norm_eps": fields.needed_number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(file, fields, arch, head_dim),
        "vocab_size": _rows(file),
    }


_READERS: dict[str, Callable[[GgufFile, MetadataFields, str], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gpt2": _gpt2,
}
