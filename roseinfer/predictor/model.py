"""Trained predictor: reads its file and predicts with NumPy alone, in well under a millisecond per prompt."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from roseinfer.core.errors import ConfigError
from roseinfer.predictor.config import READOUTS
from roseinfer.predictor.features import FeatureSpec, bags_of

FORMAT = "roseinfer-length-predictor-1"
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """`width`: tokens of a bucket. `tokenizer`: of the prompts it learnt from; others' token ids mean nothing to it.

    `vocabulary`: `fingerprint` of that tokenizer's; older files do not say.
    """

    width: float
    buckets: int = 100
    readout: str = "mean"
    tokenizer: str = ""
    vocabulary: str = ""
    features: FeatureSpec = field(default_factory=FeatureSpec)


@dataclass(frozen=True, slots=True)
class PredictorWeights:
    """Weights: `table` [features, hidden], `bias` [hidden], `out` [buckets, hidden], `out_bias` [buckets]."""

    table: Floats
    bias: Floats
    out: Floats
    out_bias: Floats


class LengthPredictor:
    """Immutable predictor, which any number of threads may use."""

    def __init__(self, settings: PredictorSettings, weights: PredictorWeights) -> None:
        self.settings = settings
        self.weights = weights
        self._middles = (np.arange(settings.buckets) + 0.5) * settings.width

    def predict(self, token_ids: Sequence[int]) -> int:
        """Return the output tokens expected of a prompt, at least 1. Raise ValueError for an empty prompt."""
        return self.predict_batch([token_ids])[0]

    def predict_batch(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        if not prompts:
            return []
        return [max(1, round(length)) for length in self.lengths(self.probabilities(prompts)).tolist()]

    def lengths(self, probabilities: Floats) -> NDArray[np.float64]:
        """Read lengths [n] in tokens out of [n, buckets], as the setting `readout` says."""
        if self.settings.readout == "mode":
            return self._middles[probabilities.argmax(axis=1)]
        return probabilities @ self._middles

    def probabilities(self, prompts: Sequence[Sequence[int]]) -> Floats:
        """Return logits [prompts, buckets]."""
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt is empty")
        bags, w = bags_of(prompts, self.settings.features), self.weights
        summed = np.add.reduceat(w.table[bags.ids] * bags.weights[:, None], bags.offsets[:-1], axis=0)
        logits = np.maximum(summed + w.bias, 0.0) @ w.out.T + w.out_bias
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: Floats = powers / powers.sum(axis=1, keepdims=True)
        return shares

    def save(self, path: str) -> None:
        """Write the predictor. Raise `ConfigError` if the file cannot be written."""
        tensors = {
            name: np.ascontiguousarray(getattr(self.weights, name)) for name in PredictorWeights.__dataclass_fields__
        }
        metadata = {"format": FORMAT, "settings": json.dumps(asdict(self.settings))}
        try:
            save_file(tensors, path, metadata)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str) -> "LengthPredictor":
        """Read a predictor. Raise `ConfigError` for any other file."""
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ConfigError(f"{path} is no length predictor of this version")
                weights = PredictorWeights(
                    **{name: file.get_tensor(name) for name in PredictorWeights.__dataclass_fields__}
                )
            found = json.loads(metadata["settings"])
            settings = PredictorSettings(**{**found, "features": FeatureSpec(**found["features"])})
        except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path} is no length predictor: {error}") from error
        _check(path, settings, weights)
        return cls(settings, weights)


def _check(path: str, settings: PredictorSettings, weights: PredictorWeights) -> None:
    hidden = len(weights.bias)
    shapes = [(settings.features.table, hidden), (hidden,), (settings.buckets, hidden), (settings.buckets,)]
    found = [getattr(weights, name).shape for name in PredictorWeights.__dataclass_fields__]
    if found != shapes or settings.readout not in READOUTS:
        raise ConfigError(f"{path} is no length predictor: its parts do not fit each other")
