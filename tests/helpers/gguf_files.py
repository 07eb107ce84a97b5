"""GGUF files of small models, written with the package of the format's authors."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from roseinfer.text.tokenizer import byte_alphabet

Tensors = dict[str, tuple[np.ndarray, str]]  # raw bytes [rows, bytes] or floats, and the encoding
# What config.json calls the sizes of the models in tests/helpers/checkpoints.py.
_SIZES = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "attention.head_count": ("num_attention_heads", "n_head"),
}
# llama.cpp's architecture of a model_type, where they differ.
_ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "granitemoehybrid": "granite",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "mistral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
# Architectures whose q and k the converter permutes.
_PERMUTED = ("llama", "smollm3", "granite", "mistral3")
# Architectures to whose norms the converter adds 1.
_RAISED = ("gemma3", "qwen35", "qwen35moe")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# Fields of config.json that become keys as they are.
_COPIED = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "final_logit_softcapping": "final_logit_softcapping",
}


def metadata_of(model: PreTrainedModel, pieces: int) -> dict[str, Any]:
    """Write a file as llama.cpp's converter does, with a byte-level vocabulary of `pieces` tokens."""
    config = model.config.to_dict()
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    found = {key: next(config[name] for name in names if name in config) for key, names in _SIZES.items()}
    if arch == "gpt2":
        found |= {"feed_forward_length": config["n_inner"] or 4 * config["n_embd"]}
        found |= {"attention.layer_norm_epsilon": float(config["layer_norm_epsilon"])}
    else:
        found |= {"feed_forward_length": config["intermediate_size"]} if "intermediate_size" in config else {}
        found |= {"attention.head_count_kv": config["num_key_value_heads"]}
        found |= _epsilon(config)
        found |= {key: config[name] for key, name in _COPIED.items() if config.get(name) is not None}
        found |= _rope(config) | _KEYS.get(config["model_type"], lambda config: {})(config)
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in found.items()},
        **vocabulary(pieces),
    }


def _epsilon(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("rms_norm_eps") is not None:
        return {"attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"])}
    return {"attention.layer_norm_epsilon": float(config.get("norm_epsilon", config.get("layer_norm_eps")))}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    found = {"rope.freq_base": float(rope.get("rope_theta", 10000.0))}
    if local is not None:
        found |= {"rope.freq_base_swa": float(local["rope_theta"])}
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        found |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    for key in ("beta_fast", "beta_slow"):
        if rope.get(key) is not None:
            found |= {f"rope.scaling.yarn_{key}": float(rope[key])}
    return found


def _rotated(config: Mapping[str, Any]) -> int:
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(width * config["rope_parameters"].get("partial_rotary_factor", 1.0))


def _pattern(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["sliding_window"] is None:
        return {}
    flags = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": flags}


def _phi3(config: Mapping[str, Any]) -> dict[str, Any]:
    original = config["original_max_position_embeddings"]
    found = {"rope.scaling.original_context_length": original, "rope.dimension_count": _rotated(config)}
    found |= {"attention.sliding_window": config["sliding_window"] or 0}
    if config["rope_parameters"]["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        found |= {"rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(original))}
    return found


def _granite4(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    found = {"attention.head_count_kv": [config["num_key_value_heads"]] * layers, "rope.scaling.finetuned": True}
    return found | {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.inner_size": 64, "ssm.time_step_rank": 4}


def _cohere2(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {"attention.sliding_window": config["sliding_window"], "logit_scale": config["logit_scale"]}
    return found | {"rope.dimension_count": _rotated(config), "rope.scaling.type": "none", "vocab_size": 99}


def _hunyuan(config: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the rotation, which `alpha` raises."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "dynamic":
        return {}
    width = _rotated(config)
    base = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
    return {"rope.freq_base": base, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    width, window = config["intermediate_size"], config["sliding_window"]
    return {"expert_feed_forward_length": width, "attention.sliding_window": window}


def _qwen3_5(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {"ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"]}
    found |= {"rope.dimension_count": _rotated(config), "rope.dimension_sections": [1, 1, 0, 0]}
    found |= {"full_attention_interval": config["layer_types"].index("full_attention") + 1}
    if "num_experts" in config:
        found |= {"expert_count": config["num_experts"]}
        found |= {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}
    return found


def _ministral3(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    found = {
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "rope.dimension_count": _rotated(config),
    }
    return found | {"attention.temperature_scale": float(rope["llama_4_scaling_beta"])}


# Keys of one model_type alone.
_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "phi3": _phi3,
    "granitemoehybrid": _granite4,
    "olmo3": _pattern,
    "exaone4": _pattern,
    "gemma3_text": _pattern,
    "glm4": lambda config: {"rope.dimension_count": _rotated(config)},
    "cohere2": _cohere2,
    "hunyuan_v1_dense": _hunyuan,
    "ministral3": _ministral3,
    "gpt_oss": _gpt_oss,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
}


def vocabulary(pieces: int) -> dict[str, Any]:
    """`pieces` letters of the byte-level alphabet, the last of them replaced by a control token that ends texts."""
    tokens = [*list(byte_alphabet())[: pieces - 1], "<|endoftext|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (pieces - 1) + [3],
        "tokenizer.ggml.eos_token_id": pieces - 1,
    }


def tensors_of(model: PreTrainedModel, encode: Callable[[str, np.ndarray], tuple[np.ndarray, str]]) -> Tensors:
    """The model's tensors under their names in such files, in the order that llama.cpp wants their rows in."""
    config = model.config.to_dict()
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(arch, layers)
    found: Tensors = {}
    for name, tensor in _apart(model.state_dict()).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if ".linear_attn." in name:
            name, tensor = _delta_tensor(name, tensor, config)
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None, name
        values = tensor.float().numpy()
        values = values.T if architecture == "gpt2" and name.endswith(_TRANSPOSED) else values
        if architecture in _PERMUTED and ".q_proj." in name:
            values = permuted(values, config["num_attention_heads"])
        if architecture in _PERMUTED and ".k_proj." in name:
            values = permuted(values, config["num_key_value_heads"])
        if architecture in _RAISED and name.endswith("norm.weight") and ".linear_attn." not in name:
            values = values + 1
        found[called] = encode(called, np.ascontiguousarray(values))
    for kind in ("short", "long"):
        if factors := (config.get("rope_parameters") or {}).get(f"{kind}_factor"):
            found[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32), "F32"
    return found


def _delta_tensor(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    """A tensor of linear attention as the converter writes it: value heads in another order, -e^A_log."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tiled(values: torch.Tensor) -> torch.Tensor:
        by_head = values.unflatten(0, (keys, heads // keys, -1))
        return by_head.transpose(0, 1).flatten(0, 2)

    mixed = 2 * keys * config["linear_key_head_dim"]
    kind = name.split(".linear_attn.")[1].removesuffix(".weight")
    if kind in ("in_proj_qkv", "conv1d"):
        tensor = torch.cat((tensor[:mixed], tiled(tensor[mixed:]))).squeeze(1)
    elif kind == "out_proj":
        tensor = tiled(tensor.T).T
    elif kind != "norm":
        tensor = tiled(tensor)
    if kind == "A_log":
        tensor = -tensor.exp()
    return name.replace("dt_bias", "dt_proj.bias"), tensor


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up by themselves: of all experts, and of the shared network of Granite 4. Transformers stacks them."""
    interleaved = any(name.endswith("gate_up_proj_bias") for name in tensors)  # gpt-oss, which also transposes
    found = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if interleaved and ".experts." in name:
            values = tensor if last.endswith("_bias") else tensor.transpose(1, 2)
            kind = "bias" if last.endswith("_bias") else "weight"
            if last.startswith("down"):
                found[f"{stem}.down_proj.{kind}"] = values
            else:
                found[f"{stem}.gate_proj.{kind}"], found[f"{stem}.up_proj.{kind}"] = values[:, ::2], values[:, 1::2]
        elif last == "sinks":
            found[f"{name}.weight"] = tensor
        elif last == "gate_up_proj":
            found[f"{stem}.gate_proj.weight"], found[f"{stem}.up_proj.weight"] = tensor.chunk(2, 1)
        elif stem.endswith("shared_mlp.input_linear"):
            mlp = stem.replace("shared_mlp.input_linear", "mlp")
            found[f"{mlp}.gate_proj.weight"], found[f"{mlp}.up_proj.weight"] = tensor.chunk(2, 0)
        elif stem.endswith("shared_mlp.output_linear"):
            found[f"{stem.replace('shared_mlp.output_linear', 'mlp.down_proj')}.weight"] = tensor
        else:
            found[f"{name}.weight" if last == "down_proj" else name] = tensor
    return found


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py: both halves of a head, interleaved."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def as_floats(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
    return values, "F32"


def write(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    """Values by their kinds: an int is written as uint32, a float as float32."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, (data, encoding) in tensors.items():
        kind = gguf.GGMLQuantizationType[encoding]
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=None if encoding in ("F32", "F16") else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_model(path: Path, model: PreTrainedModel, **changes: Any) -> Path:
    """All of it in float32; `changes` of the metadata, None takes a key away."""
    metadata = metadata_of(model, model.config.vocab_size) | changes
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write(path, kept, tensors_of(model, as_floats))


def quantised(encoding: str, shape: tuple[int, int]) -> np.ndarray:
    """Codes [rows, bytes] of random weights of about unit size, with every bit of a block in use.

    Scales are float16 in all of these encodings, and where they lie in a block is the format's.
    """
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
    at = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(encoding, (0,))
    for start in at:
        scales = rng.uniform(0.5, 1.5, len(blocks)) / {"Q8_0": 100, "Q6_K": 2000, "Q4_K": 300, "Q5_K": 600}.get(
            encoding, 10
        )
        blocks[:, start : start + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def floats_of(data: np.ndarray, encoding: str) -> torch.Tensor:
    """The values as transformers reads them, or `gguf` where it does not, or reads with `gguf` itself."""
    kind = gguf.GGMLQuantizationType[encoding]
    try:
        from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
    except ImportError:
        return torch.from_numpy(gguf.dequantize(data, kind))
    if int(kind) not in GGML_BLOCK:
        return torch.from_numpy(gguf.dequantize(data, kind))
    return dequantize(torch.from_numpy(data), int(kind))
