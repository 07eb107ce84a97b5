"""Features of a prompt: a bag of hashed token n-grams, and its length.

The head says what kind of task it is, the tail what is asked or how far a text has come; in between, which tokens
occur. Each group has length 1 (Euclidean), so that long prompts do not shout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """`table`: features that hashes are spread over, a power of two. The others are tokens of the prompt looked at;
    those of both `ends` with their places.
    """

    table: int = 1 << 14
    head: int = 64
    tail: int = 64
    body: int = 2048
    ends: int = 4
    head_grams: int = 2
    tail_grams: int = 3


class FeatureBags(NamedTuple):
    """Features of several prompts: prompt i has `ids[offsets[i] : offsets[i + 1]]`, each with a weight."""

    ids: Ids
    weights: Weights
    offsets: Ids

    def select(self, rows: Ids) -> "FeatureBags":
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], counts)
        return FeatureBags(self.ids[index], self.weights[index], offsets)


def bags_of(prompts: Sequence[Sequence[int]], spec: FeatureSpec) -> FeatureBags:
    parts = [_features(prompt, spec) for prompt in prompts]
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in parts])]).astype(np.int64)
    return FeatureBags(np.concatenate([ids for ids, _ in parts]), np.concatenate([w for _, w in parts]), offsets)


def _features(prompt: Sequence[int], spec: FeatureSpec) -> tuple[Ids, Weights]:
    tokens = np.asarray(prompt[: spec.body], dtype=np.uint64) + np.uint64(1)
    head, tail = tokens[: spec.head], np.asarray(prompt[-spec.tail :], dtype=np.uint64) + np.uint64(1)
    first, last = head[: spec.ends], tail[-spec.ends :]
    groups = [
        _hash(np.unique(tokens)[:, None], 0),
        *(_hash(_grams(head, n), 10 + n) for n in range(1, spec.head_grams + 1)),
        *(_hash(_grams(tail, n), 20 + n) for n in range(1, spec.tail_grams + 1)),
        _hash(np.stack([first, np.arange(len(first), dtype=np.uint64)], axis=1), 30),
        _hash(np.stack([last, np.arange(len(last), 0, -1, dtype=np.uint64)], axis=1), 31),
        _hash(_steps(len(prompt)), 40),
    ]
    kept = [group for group in groups if len(group)]
    ids = np.concatenate(kept) & np.uint64(spec.table - 1)
    weights = np.concatenate([np.full(len(group), len(group) ** -0.5, dtype=np.float32) for group in kept])
    return ids.astype(np.int64), weights


def _grams(tokens: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Return n-grams [len(tokens) - n + 1, n]; none if there are fewer tokens."""
    if len(tokens) < n:
        return np.empty((0, n), dtype=np.uint64)
    return np.lib.stride_tricks.sliding_window_view(tokens, n)


def _steps(length: int) -> NDArray[np.uint64]:
    """Return the half octaves near a length, so that similar lengths share features."""
    at = round(2 * np.log2(length))
    return np.arange(at, at + 3, dtype=np.uint64)[:, None]


def _hash(grams: NDArray[np.uint64], kind: int) -> NDArray[np.uint64]:
    """Hash [n, tokens] to [n] with wrap-around arithmetic."""
    found = np.full(len(grams), kind + 1, dtype=np.uint64)
    for column in range(grams.shape[1]):
        found = (found ^ grams[:, column]) * _MIX
        found ^= found >> _SHIFT
    found *= _MIX
    return found >> np.uint64(20)
