"""Names of a model's tensors in a GGUF file, and the order of their rows."""

import re
from typing import NamedTuple

import numpy as np

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.spec import ModelSpec

_LLAMA_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LLAMA_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPERTS_BLOCK = {**_LLAMA_BLOCK, "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp"}
# One tensor holds all experts of a layer.
_STACKED = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_GPT2_ENDS = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
_GPT2_BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_NAMES = {
    "LlamaForCausalLM": (_LLAMA_ENDS, _LLAMA_BLOCK),
    "Qwen2ForCausalLM": (_LLAMA_ENDS, _LLAMA_BLOCK),
    "Qwen3ForCausalLM": (_LLAMA_ENDS, _LLAMA_BLOCK),
    "Qwen3MoeForCausalLM": (_LLAMA_ENDS, _EXPERTS_BLOCK),
    "MixtralForCausalLM": (_LLAMA_ENDS, _EXPERTS_BLOCK),
    "GPT2LMHeadModel": (_GPT2_ENDS, _GPT2_BLOCK),
}
_IN_BLOCK = re.compile(r"(?:model\.layers|h)\.(?P<layer>\d+)\.(?P<part>.+)\.(?P<kind>weight|bias)")
_IN_EXPERT = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight"
)
_AT_END = re.compile(r"(?P<part>.+)\.(?P<kind>weight|bias)")
_QUERIES_KEYS = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>[qk])\.(?:weight|bias)")


# llama.cpp rotates neighbouring numbers of a Llama's head together; the model's own code rotates numbers that are half
# a head apart.
_INTERLEAVED = ("LlamaForCausalLM", "MixtralForCausalLM")


class StoredTensor(NamedTuple):
    """Tensor of a file that holds one of the model's tensors: all of it, or slice `part` of its first dimension."""

    name: str
    part: int | None = None


class GgufNames:
    """Mapping from the names of a model's own checkpoint to those of its GGUF file."""

    def __init__(self, spec: ModelSpec) -> None:
        """Raise `UnsupportedModelError` for an architecture whose names are unknown."""
        if spec.architecture not in _NAMES:
            known = ", ".join(_NAMES)
            raise UnsupportedModelError(f"{spec.architecture} in a GGUF file is not supported; known: {known}")
        self._ends, self._block = _NAMES[spec.architecture]
        self._spec = spec

    def of(self, name: str) -> StoredTensor | None:
        """Return the tensor's place in the file; None if such files do not have it."""
        match = _IN_EXPERT.fullmatch(name)
        if match is not None and match["part"] in _STACKED:
            return StoredTensor(f"blk.{match['layer']}.{_STACKED[match['part']]}.weight", int(match["expert"]))
        match = _IN_BLOCK.fullmatch(name)
        if match is not None and match["part"] in self._block:
            return StoredTensor(f"blk.{match['layer']}.{self._block[match['part']]}.{match['kind']}")
        match = _AT_END.fullmatch(name)
        if match is not None and match["part"] in self._ends:
            return StoredTensor(f"{self._ends[match['part']]}.{match['kind']}")
        return None

    def row_order(self, gguf_name: str) -> np.ndarray | None:
        """Return the file's row for each row of the model's tensor; None if they are the same.

        llama.cpp's converter interleaves the halves of every head of a Llama's q and k. Other architectures keep their
        order.
        """
        match = _QUERIES_KEYS.fullmatch(gguf_name)
        if match is None or self._spec.architecture not in _INTERLEAVED:
            return None
        attention = self._spec.attention[int(match["layer"])]
        heads = attention.heads if match["which"] == "q" else attention.kv_heads
        width = attention.head_dim
        return np.arange(heads * width).reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(-1)
