"""Heads of decoders that return vectors: an embedding, or a score from the logits of two tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.models.base import CausalLM
from roseinfer.models.pooling.config import DenseSpec

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Layer activation(x @ weight.T + bias) in float32. weight: [width, inputs]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str

    @classmethod
    def load(cls, spec: DenseSpec, device: torch.device) -> "DenseLayer":
        """Read the weights. Raise `ModelNotFoundError` without them, `UnsupportedModelError` if they do not fit."""
        path = spec.folder / "model.safetensors"
        if not path.is_file():
            raise ModelNotFoundError(f"{spec.folder} holds no {path.name}")
        shapes = {"linear.weight": [spec.width, spec.inputs]} | ({"linear.bias": [spec.width]} if spec.bias else {})
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise UnsupportedModelError(f"{path} is not a safetensors file: {error}") from error
        found = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if found != shapes:
            raise UnsupportedModelError(f"{path} holds {found}, config.json says {shapes}")
        tensors = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        return cls(tensors["linear.weight"], tensors.get("linear.bias"), spec.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))


class EmbeddingHead:
    """Dense layers, if any, then division by the length. Everything after the states is in float32.

    `states`: the model's last step before pooling, such as its final norm.
    """

    def __init__(
        self,
        states: Callable[[torch.Tensor], torch.Tensor],
        hidden: int,
        dense: tuple[DenseSpec, ...],
        device: torch.device,
        *,
        normalized: bool,
    ) -> None:
        self.states = states
        self.width = hidden
        for spec in dense:
            if spec.inputs != self.width:
                raise UnsupportedModelError(f"{spec.folder}: in_features is {spec.inputs}, but it gets {self.width}")
            self.width = spec.width
        self._dense = [DenseLayer.load(spec, device) for spec in dense]
        self._normalized = normalized

    def vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        x = pooled.float()
        for layer in self._dense:
            x = layer(x)
        return F.normalize(x, dim=1) if self._normalized else x


class YesNoHead:
    """Probability of one token among two, from the logits at the last position (Qwen3-Reranker)."""

    width = 1

    def __init__(self, model: CausalLM, yes: int, no: int) -> None:
        self._model = model
        self._ids = torch.tensor([yes, no], device=model.device)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(pooled).index_select(1, self._ids).float()
        return torch.softmax(logits, dim=1)[:, :1]


class LogitHead:
    """Score of an encoder's pooled states: `logits` returns [n, 1], and `activation` is applied to it."""

    width = 1

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor], activation: str) -> None:
        self._logits = logits
        self._activation = _ACTIVATIONS[activation]

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        return self._activation(self._logits(pooled).float())
