"""Folders of random EAGLE-3 heads, as SpecForge and EAGLE write them ("flat") or as speculators does ("nested")."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, kw_only=True)
class EagleFolder:
    """Random head: its options, as a reader should find them, and its tensors under speculators' names.

    ids: listed layers, None for no list. targets: tokens of the target that it can draft, in the order of its rows;
    None for all. hidden: of the head, None for the target's. shares: tensors that it takes from the target.
    """

    target_hidden: int
    vocabulary: int
    nested: bool = False
    ids: tuple[int, ...] | None = (1, 2)
    streams: int | None = None
    targets: tuple[int, ...] | None = None
    hidden: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    width: int = 48
    rope: dict[str, Any] = field(default_factory=lambda: dict(ROPE))
    shares: tuple[str, ...] = ("embed_tokens",)
    flags: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    inner_changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def own_hidden(self) -> int:
        return self.hidden or self.target_hidden

    @property
    def drafted(self) -> int:
        return self.vocabulary if self.targets is None else len(self.targets)

    def config(self) -> dict[str, Any]:
        layer = {
            "model_type": "llama",
            "attention_bias": False,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.own_hidden,
            "intermediate_size": self.width,
            "max_position_embeddings": 2048,
            "num_attention_heads": self.heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": self.rope,
            "use_cache": True,
            "vocab_size": self.vocabulary,
            **self.inner_changes,
        }
        own: dict[str, Any] = {"draft_vocab_size": self.drafted, "tie_word_embeddings": False}
        if self.ids is not None:
            own["eagle_aux_hidden_state_layer_ids"] = list(self.ids)
        if self.hidden is not None:
            own["target_hidden_size"] = self.target_hidden
        own |= dict.fromkeys(self.flags, True)
        if not self.nested:
            return {**layer, "architectures": ["LlamaForCausalLMEagle3"], **own, **self.changes}
        proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
            },
            "norm_before_residual": False,
            "transformer_layer_config": layer,
            **own,
            **self.changes,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        hidden, streams = self.own_hidden, self.streams or len(self.ids or (0, 0, 0))
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, streams * self.target_hidden),
            "layers.0.input_layernorm.weight": (hidden,),
            "layers.0.hidden_norm.weight": (hidden,),
            "layers.0.post_attention_layernorm.weight": (hidden,),
            "layers.0.self_attn.q_proj.weight": (queries, 2 * hidden),
            "layers.0.self_attn.k_proj.weight": (keys, 2 * hidden),
            "layers.0.self_attn.v_proj.weight": (keys, 2 * hidden),
            "layers.0.self_attn.o_proj.weight": (hidden, queries),
            "layers.0.mlp.gate_proj.weight": (self.width, hidden),
            "layers.0.mlp.up_proj.weight": (self.width, hidden),
            "layers.0.mlp.down_proj.weight": (hidden, self.width),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.drafted, hidden),
            "embed_tokens.weight": (self.vocabulary, hidden),
        }
        if "norm_before_fc" in self.flags:
            shapes["input_norm.weight"] = (streams * self.target_hidden,)
        if "fc_norm" in self.flags:
            shapes |= {f"fc_norm.{i}.weight": (self.target_hidden,) for i in range(streams)}
        tensors = {}
        for name, shape in shapes.items():
            mean, std = (1.0, 0.3) if len(shape) == 1 else (0.0, shape[-1] ** -0.5)
            tensors[name] = torch.empty(shape).normal_(mean, std, generator=generator)
        for name in self.shares:
            del tensors[f"{name}.weight"]
        if self.targets is not None:
            targets = torch.tensor(self.targets)
            tensors["d2t"] = targets - torch.arange(len(targets))
            tensors["t2d"] = torch.isin(torch.arange(self.vocabulary), targets)
        return tensors

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        tensors = self.tensors()
        if not self.nested:
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder
