"""Training: 100 equal-width buckets of output lengths, as SCORPIO's predictor has, over hashed n-grams.

Summed embeddings of a prompt's features, one hidden layer, a softmax. Neighbouring buckets are nearly right, so the
target is a narrow bell around the true one; an output that was cut only says that its bucket is none before. The rows
are split 6:2:2; the epoch with the least error (RMSE of the mean) on the second part is kept, the third only judges,
by the outputs that were not cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from roseinfer.core.progress import stage
from roseinfer.predictor.config import READOUTS, TrainConfig
from roseinfer.predictor.data import TrainingRows
from roseinfer.predictor.features import FeatureBags, bags_of
from roseinfer.predictor.metrics import PredictionMetrics, bucket_of, judge
from roseinfer.predictor.model import LengthPredictor, PredictorSettings, PredictorWeights

DEFAULT_HIDDEN = 32
BATCH_ROWS = 32
DEFAULT_LEARNING_RATE = 1e-3
DEFAULT_WEIGHT_DECAY = 0.05
DROPOUT_SHARE = 0.5  # of the features
MAX_EPOCHS_WITHOUT_GAIN = 6  # epochs without a better one, after which none is expected
DEFAULT_BELL_BUCKETS = 1.5  # standard deviation of the target, in buckets


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of a training. `figures`: by read-out, on the held-out rows. `train_rows`: rows used for training."""

    predictor: LengthPredictor
    figures: dict[str, PredictionMetrics]
    train_rows: int
    best_epoch: int


class _Outputs(NamedTuple):
    """Return targets [rows, buckets]: a bell; for a row that was cut, 1 for each possible bucket."""

    bags: FeatureBags
    lengths: NDArray[np.float64]
    cut: NDArray[np.bool_]
    targets: Tensor


class _Layers(NamedTuple):
    table: Tensor
    bias: Tensor
    out: Tensor
    out_bias: Tensor


def train(rows: TrainingRows, config: TrainConfig, vocabulary: str = "") -> TrainingResult:
    """Train a predictor; equal rows, options and thread counts give equal weights. `vocabulary`: its fingerprint."""
    width = max(1, ceil((config.longest or max(rows.lengths)) / 100))
    settings = PredictorSettings(width=width, readout=config.readout, tokenizer=config.model, vocabulary=vocabulary)
    order = np.random.default_rng(config.seed).permutation(len(rows))
    parts = np.split(order, [len(rows) * 6 // 10, len(rows) * 8 // 10])
    outputs = _outputs(rows, settings)
    with stage("training, epoch") as step:
        weights, best = _learn(outputs, parts[0], parts[1], settings, config, step)
    predictor = LengthPredictor(settings, weights)
    held_out = parts[2][~outputs.cut[parts[2]]]
    figures = _figures(predictor, [rows.prompts[i] for i in held_out], outputs.lengths[held_out])
    return TrainingResult(predictor, figures, len(parts[0]), best)


def _outputs(rows: TrainingRows, settings: PredictorSettings) -> "_Outputs":
    lengths, cut = np.asarray(rows.lengths, dtype=np.float64), np.asarray(rows.cut, dtype=bool)
    buckets = bucket_of(lengths, settings.width, settings.buckets)
    bells, cut_rows = _bells(buckets, settings.buckets), torch.from_numpy(cut)
    beyond = torch.arange(settings.buckets)[None, :] >= torch.from_numpy(buckets)[:, None]
    targets = torch.where(cut_rows[:, None], beyond.float(), bells)
    return _Outputs(bags_of(rows.prompts, settings.features), lengths, cut, targets)


def _figures(
    predictor: LengthPredictor, prompts: Sequence[list[int]], true: NDArray[np.float64]
) -> dict[str, PredictionMetrics]:
    found = {}
    for readout in READOUTS:
        settings = replace(predictor.settings, readout=readout)
        said = LengthPredictor(settings, predictor.weights).predict_batch(prompts)
        found[readout] = judge(said, true, settings.width, settings.buckets)
    return found


def _learn(
    outputs: _Outputs,
    learnt: NDArray[np.int64],
    chosen_by: NDArray[np.int64],
    settings: PredictorSettings,
    config: TrainConfig,
    step: Callable[[int, int], None],
) -> tuple[PredictorWeights, int]:
    generator = torch.Generator().manual_seed(config.seed)
    whole = learnt[~outputs.cut[learnt]]
    layers = _start(settings, outputs.targets[whole].mean(dim=0), generator)
    optimizer = torch.optim.AdamW(layers, lr=DEFAULT_LEARNING_RATE, weight_decay=DEFAULT_WEIGHT_DECAY)
    best, best_error, best_epoch = _as_weights(layers), float("inf"), 0
    for epoch in range(1, config.epochs + 1):
        shuffled = learnt[torch.randperm(len(learnt), generator=generator).numpy()]
        for first in range(0, len(shuffled), BATCH_ROWS):
            batch = shuffled[first : first + BATCH_ROWS]
            loss = _loss(_logits(layers, outputs.bags.select(batch), generator), outputs, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        step(epoch, config.epochs)
        error = _error(layers, outputs, chosen_by, settings)
        if error < best_error:
            best, best_error, best_epoch = _as_weights(layers), error, epoch
        elif epoch - best_epoch >= MAX_EPOCHS_WITHOUT_GAIN:
            break
    return best, best_epoch


def _loss(logits: Tensor, outputs: _Outputs, rows: NDArray[np.int64]) -> Tensor:
    """Return cross entropy with the bell; for a row that was cut, minus the logarithm of all possible buckets."""
    logs, targets = logits.log_softmax(dim=1), outputs.targets[rows]
    possible = -(logs + targets.log()).logsumexp(dim=1)
    return torch.where(torch.from_numpy(outputs.cut[rows]), possible, -(targets * logs).sum(dim=1)).mean()


def _error(layers: _Layers, outputs: _Outputs, rows: NDArray[np.int64], settings: PredictorSettings) -> float:
    """Return the root mean square error in tokens. A row that was cut counts as the prediction if that is longer."""
    middles = (torch.arange(settings.buckets) + 0.5) * settings.width
    with torch.no_grad():
        shares = _logits(layers, outputs.bags.select(rows)).softmax(dim=1)
        possible = shares * outputs.targets[rows]
        beyond = (possible @ middles) / possible.sum(dim=1).clamp_min(1e-30)
    true = np.where(outputs.cut[rows], beyond.numpy(), outputs.lengths[rows])
    return float(np.sqrt(np.mean(((shares @ middles).numpy() - true) ** 2)))


def _bells(buckets: NDArray[np.int64], count: int) -> Tensor:
    """Return targets [rows, count]."""
    distance = (torch.arange(count)[None, :] - torch.from_numpy(buckets)[:, None]) / DEFAULT_BELL_BUCKETS
    return (-0.5 * distance**2).softmax(dim=1)


def _start(settings: PredictorSettings, shares: Tensor, generator: torch.Generator) -> _Layers:
    """Initialise the bias with the frequency of each bucket."""
    table = 0.1 * torch.randn(settings.features.table, DEFAULT_HIDDEN, generator=generator)
    out = torch.randn(settings.buckets, DEFAULT_HIDDEN, generator=generator) / DEFAULT_HIDDEN**0.5
    layers = _Layers(table, torch.full((DEFAULT_HIDDEN,), 0.1), 0.1 * out, (shares + 1e-4).log())
    return _Layers(*(layer.requires_grad_() for layer in layers))


def _logits(layers: _Layers, bags: FeatureBags, dropout: torch.Generator | None = None) -> Tensor:
    """Return logits [bags, buckets]."""
    weights = torch.from_numpy(bags.weights)
    if dropout is not None:
        weights = weights * (torch.rand(len(weights), generator=dropout) >= DROPOUT_SHARE) / (1 - DROPOUT_SHARE)
    ids, offsets = torch.from_numpy(bags.ids), torch.from_numpy(bags.offsets[:-1])
    summed = embedding_bag(ids, layers.table, offsets, mode="sum", per_sample_weights=weights)
    return (summed + layers.bias).relu() @ layers.out.T + layers.out_bias


def _as_weights(layers: _Layers) -> PredictorWeights:
    return PredictorWeights(*(layer.detach().numpy().copy() for layer in layers))
