"""Reference sampling of one row in plain Python, without torch."""

import math
from collections import Counter

from roseinfer.core.sampling import SequenceParams

MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    key = _mix((seed + 0x9E3779B97F4A7C15) & MASK)
    return (_mix((key + (index + 1) * 0x9E3779B97F4A7C15) & MASK) >> 12) / 2**52


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def edited(
    logits: list[float], params: SequenceParams, prompt: list[int], outputs: list[int], stop_ids: tuple[int, ...] = ()
) -> list[float]:
    """Return the logits after penalties, logit bias and the masks."""
    counts = Counter(outputs)
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in counts:
            r = params.repetition_penalty
            value = value / r if value > 0 else value * r
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (token in counts)
        result.append(value)
    for token, bias in params.logit_bias:
        result[token] += bias
    for token in range(len(result)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            result[token] = -math.inf
    for *before, last in params.bad_token_ids:
        if outputs[len(outputs) - len(before) :] == before and len(before) <= len(outputs):
            result[last] = -math.inf
    if len(outputs) < params.min_tokens:
        for token in stop_ids:
            result[token] = -math.inf
    return result


def distribution(logits: list[float], params: SequenceParams) -> dict[int, float]:
    """Return the probability of every token that can be drawn (temperature > 0)."""
    best = max(logits)
    weights = {t: math.exp((x - best) / params.temperature) for t, x in enumerate(logits)}
    weights = {t: w for t, w in weights.items() if w > 0 and w >= params.min_p}
    ranked = sorted(weights, key=lambda t: (-weights[t], t))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(weights[t] for t in ranked)
    kept, before = [], 0.0
    for token in ranked:
        if params.top_p < 1 and before >= params.top_p * total:
            break
        kept.append(token)
        before += weights[token]
    mass = sum(weights[t] for t in kept)
    return {t: weights[t] / mass for t in kept}
