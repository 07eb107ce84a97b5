"""Training: 100 equal-width buckets of output lengths, as SCORPIO's predictor has, over hashed n-grams.

Summed embeddings of a prompt's features, one hidden layer, a softmax. Neighbouring buckets are nearly right, so the
target is a narrow bell around the true one. The rows are split 6:2:2; the epoch with the least error (RMSE of the
mean) on the second part is kept, the third only judges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding_bag

from roseinfer.predictor.config import READOUTS, TrainConfig
from roseinfer.predictor.data import Rows
from roseinfer.predictor.features import Bags, bags_of
from roseinfer.predictor.metrics import Figures, bucket_of, judge
from roseinfer.predictor.model import Predictor, Settings, Weights

HIDDEN = 32
BATCH = 32
LEARNING_RATE = 1e-3
DECAY = 0.05
DROPOUT = 0.5  # of the features
PATIENCE = 6  # epochs without a better one, after which none is expected
BELL = 1.5  # standard deviation of the target, in buckets


@dataclass(frozen=True, slots=True)
class Trained:
    """`figures` by read-out, on the rows that were held out; `train_rows` were learnt from."""

    predictor: Predictor
    figures: dict[str, Figures]
    train_rows: int
    best_epoch: int


class _Layers(NamedTuple):
    table: Tensor
    bias: Tensor
    out: Tensor
    out_bias: Tensor


def train(rows: Rows, config: TrainConfig) -> Trained:
    """Equal rows, options and thread counts give equal weights."""
    longest = config.longest or max(rows.lengths)
    settings = Settings(width=max(1, ceil(longest / 100)), readout=config.readout, tokenizer=config.model)
    order = np.random.default_rng(config.seed).permutation(len(rows))
    parts = np.split(order, [len(rows) * 6 // 10, len(rows) * 8 // 10])
    bags, lengths = bags_of(rows.prompts, settings.features), np.asarray(rows.lengths, dtype=np.float64)
    weights, best = _learn(bags, lengths, parts[0], parts[1], settings, config)
    predictor = Predictor(settings, weights)
    held_out = [rows.prompts[i] for i in parts[2]]
    return Trained(predictor, _figures(predictor, held_out, lengths[parts[2]]), len(parts[0]), best)


def _figures(predictor: Predictor, prompts: Sequence[list[int]], true: NDArray[np.float64]) -> dict[str, Figures]:
    found = {}
    for readout in READOUTS:
        settings = replace(predictor.settings, readout=readout)
        said = Predictor(settings, predictor.weights).predict_batch(prompts)
        found[readout] = judge(said, true, settings.width, settings.buckets)
    return found


def _learn(
    bags: Bags,
    lengths: NDArray[np.float64],
    learnt: NDArray[np.int64],
    chosen_by: NDArray[np.int64],
    settings: Settings,
    config: TrainConfig,
) -> tuple[Weights, int]:
    generator = torch.Generator().manual_seed(config.seed)
    targets = _bells(bucket_of(lengths, settings.width, settings.buckets), settings.buckets)
    layers = _start(settings, targets[learnt].mean(dim=0), generator)
    optimizer = torch.optim.AdamW(layers, lr=LEARNING_RATE, weight_decay=DECAY)
    middles = (torch.arange(settings.buckets) + 0.5) * settings.width
    best, best_error, best_epoch = _as_weights(layers), float("inf"), 0
    for epoch in range(1, config.epochs + 1):
        shuffled = learnt[torch.randperm(len(learnt), generator=generator).numpy()]
        for first in range(0, len(shuffled), BATCH):
            batch = shuffled[first : first + BATCH]
            loss = cross_entropy(_logits(layers, bags.select(batch), generator), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            said = _logits(layers, bags.select(chosen_by)).softmax(dim=1) @ middles
        error = float(np.sqrt(np.mean((said.numpy() - lengths[chosen_by]) ** 2)))
        if error < best_error:
            best, best_error, best_epoch = _as_weights(layers), error, epoch
        elif epoch - best_epoch >= PATIENCE:
            break
    return best, best_epoch


def _bells(buckets: NDArray[np.int64], count: int) -> Tensor:
    """[rows, count]: targets."""
    distance = (torch.arange(count)[None, :] - torch.from_numpy(buckets)[:, None]) / BELL
    return (-0.5 * distance**2).softmax(dim=1)


def _start(settings: Settings, shares: Tensor, generator: torch.Generator) -> _Layers:
    """Begins with saying how frequent each bucket is."""
    table = 0.1 * torch.randn(settings.features.table, HIDDEN, generator=generator)
    out = torch.randn(settings.buckets, HIDDEN, generator=generator) / HIDDEN**0.5
    layers = _Layers(table, torch.full((HIDDEN,), 0.1), 0.1 * out, (shares + 1e-4).log())
    return _Layers(*(layer.requires_grad_() for layer in layers))


def _logits(layers: _Layers, bags: Bags, dropout: torch.Generator | None = None) -> Tensor:
    """[bags, buckets]."""
    weights = torch.from_numpy(bags.weights)
    if dropout is not None:
        weights = weights * (torch.rand(len(weights), generator=dropout) >= DROPOUT) / (1 - DROPOUT)
    ids, offsets = torch.from_numpy(bags.ids), torch.from_numpy(bags.offsets[:-1])
    summed = embedding_bag(ids, layers.table, offsets, mode="sum", per_sample_weights=weights)
    return (summed + layers.bias).relu() @ layers.out.T + layers.out_bias


def _as_weights(layers: _Layers) -> Weights:
    return Weights(*(layer.detach().numpy().copy() for layer in layers))
