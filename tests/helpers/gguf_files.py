"""GGUF files of small models, written with the package of the format's authors."""

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
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def metadata_of(model: PreTrainedModel, pieces: int) -> dict[str, Any]:
    """Write a file as llama.cpp's converter does, with a byte-level vocabulary of `pieces` tokens."""
    config = model.config.to_dict()
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    found = {f"{arch}.{key}": next(config[name] for name in names if name in config) for key, names in _SIZES.items()}
    if arch == "gpt2":
        found |= {"gpt2.feed_forward_length": config["n_inner"] or 4 * config["n_embd"]}
        found |= {"gpt2.attention.layer_norm_epsilon": float(config["layer_norm_epsilon"])}
    else:
        rope = config.get("rope_parameters") or {}
        found |= {f"{arch}.feed_forward_length": config["intermediate_size"]}
        found |= {f"{arch}.attention.head_count_kv": config["num_key_value_heads"]}
        found |= {f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"])}
        found |= {f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10000.0))}
        if rope.get("rope_type") == "linear":
            found |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": float(rope["factor"])}
        if config.get("head_dim"):
            found |= {f"{arch}.attention.key_length": config["head_dim"]}
            found |= {f"{arch}.attention.value_length": config["head_dim"]}
        if "num_local_experts" in config:
            found |= {f"{arch}.expert_count": config["num_local_experts"]}
            found |= {f"{arch}.expert_used_count": config["num_experts_per_tok"]}
        if "moe_intermediate_size" in config:
            found |= {f"{arch}.expert_feed_forward_length": config["moe_intermediate_size"]}
    return {"general.architecture": arch, **found, **vocabulary(pieces)}


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
    called = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == called)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(arch, layers)
    found: Tensors = {}
    tied = config.get("tie_word_embeddings")
    for name, tensor in _experts_apart(model.state_dict()).items():
        if name == "lm_head.weight" and tied:
            continue
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None, name
        values = tensor.float().numpy()
        values = values.T if name.endswith(_TRANSPOSED) else values
        if config["model_type"] in ("llama", "mixtral") and ".q_proj." in name:
            values = permuted(values, config["num_attention_heads"])
        if config["model_type"] in ("llama", "mixtral") and ".k_proj." in name:
            values = permuted(values, config["num_key_value_heads"])
        found[called] = encode(called, np.ascontiguousarray(values))
    return found


def _experts_apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up of all experts, which transformers stacks, by themselves."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            found[f"{stem}.gate_proj.weight"], found[f"{stem}.up_proj.weight"] = tensor.chunk(2, 1)
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
