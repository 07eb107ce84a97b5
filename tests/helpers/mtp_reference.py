"""Multi-token prediction heads with random weights: tensors for a checkpoint, and a plain reference."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel


class MtpReference:
    """Head of a hybrid model. Its layer is transformers' own with attention, with other weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._inner = getattr(model.model, "language_model", model.model)
        self._lm_head = model.lm_head
        torch.manual_seed(99)
        with torch.no_grad():
            full = next(layer for layer in self._inner.layers if hasattr(layer, "self_attn"))
            self._layer = deepcopy(full)
            self._norms = {name: deepcopy(self._inner.norm) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
            self._norms["norm"] = deepcopy(self._inner.norm)
            for part in (self._layer, *self._norms.values()):
                for parameter in part.parameters():
                    parameter.normal_(0.0, 0.25)
            hidden = self._inner.norm.weight.shape[0]
            self._fc = torch.randn(hidden, 2 * hidden) * 0.25

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"mtp.layers.0.{name}": value for name, value in self._layer.state_dict().items()}
        found.update({f"mtp.{name}.weight": norm.weight.data for name, norm in self._norms.items()})
        return {name: value.contiguous() for name, value in found.items()} | {"mtp.fc.weight": self._fc}

    def add_to(self, folder: Path) -> None:
        """Add the head to a saved model."""
        path = folder / "model.safetensors"
        save_file(load_file(path) | self.tensors(), path, {"format": "pt"})

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the model's states [T, hidden] after its final norm."""
        return self._inner(torch.tensor([tokens])).last_hidden_state[0]

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], states: torch.Tensor, count: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return the greedy drafts that follow all tokens, and the logits of each.

        states: of each token but the last.
        """
        known, drafts, logits = list(tokens), [], []
        for _ in range(count):
            embedded = self._inner.embed_tokens(torch.tensor(known[1:]))
            pair = (self._norms["pre_fc_norm_embedding"](embedded), self._norms["pre_fc_norm_hidden"](states))
            x, length = torch.cat(pair, -1) @ self._fc.T, len(states)
            positions = torch.arange(length)[None]
            rotation = self._inner.rotary_emb(x[None], positions)
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            out = self._layer(x[None], position_embeddings=rotation, attention_mask=mask, position_ids=positions)
            out = (out[0] if isinstance(out, tuple) else out).view(length, -1)
            state = self._norms["norm"](out[-1:])
            logits.append(self._lm_head(state)[0])
            drafts.append(int(logits[-1].argmax()))
            known.append(drafts[-1])
            states = torch.cat((states, state))
        return drafts, logits
