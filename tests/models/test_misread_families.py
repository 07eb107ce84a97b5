"""Wrong readings of a family, each of which the comparison with transformers must notice."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.models.config import read_model_spec
from roseinfer.models.decoder import Decoder
from roseinfer.models.families import family_of
from roseinfer.models.loader import Checkpoint
from roseinfer.models.spec import LayerSpec, ModelSpec
from roseinfer.parallel.group import SingleRank
from roseinfer.quant.base import Build
from roseinfer.quant.plain import PlainFormat
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, reference_logits, save_reference

TOKENS = list(range(1, 71))
# Below it, a comparison with a tolerance could overlook the error.
MIN_ERROR_LOGITS = 0.01


def changed_ropes(spec: ModelSpec, change: Callable[[RopeSpec | None], RopeSpec | None]) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, rope=change(layer.rope)) for layer in spec.layers))


def ropes_with(**values: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: changed_ropes(spec, lambda rope: rope and replace(rope, **values))


def rope_everywhere(spec: ModelSpec) -> ModelSpec:
    rope = next(layer.rope for layer in spec.layers if layer.rope)
    return changed_ropes(spec, lambda _: rope)


def without_windows(spec: ModelSpec) -> ModelSpec:
    def full(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, window=None))

    return replace(spec, layers=tuple(map(full, spec.layers)))


def with_norms(**values: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, norm=replace(spec.norm, **values))


def with_scale(scale: float) -> Callable[[ModelSpec], ModelSpec]:
    def scaled(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, scale=scale))

    return lambda spec: replace(spec, layers=tuple(map(scaled, spec.layers)))


def ropes_of_layer(index: int) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: changed_ropes(spec, lambda _: spec.layers[index].rope)


def with_experts(**values: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.experts is not None
        return replace(spec, experts=replace(spec.experts, **values))

    return change


def with_deltas(**values: int) -> Callable[[ModelSpec], ModelSpec]:
    def change(spec: ModelSpec) -> ModelSpec:
        layers = [
            layer if layer.delta is None else LayerSpec(delta=replace(layer.delta, **values)) for layer in spec.layers
        ]
        return replace(spec, layers=tuple(layers))

    return change


def changed_attention(spec: ModelSpec, **values: Any) -> ModelSpec:
    layers = (replace(layer, attention=replace(layer.attention, **values)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def changed_experts(spec: ModelSpec, **values: Any) -> ModelSpec:
    assert spec.experts is not None
    return replace(spec, experts=replace(spec.experts, **values))


def with_values(**values: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **values)


MISREAD: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "halves for pairs, ERNIE": ("ernie", ropes_with(interleaved=False)),
    "halves for pairs, Cohere2": ("cohere2", ropes_with(interleaved=False)),
    "rotation in layers without": ("cohere2", rope_everywhere),
    "no window": ("cohere2", without_windows),
    "sequential for parallel parts": ("cohere2", with_values(parallel=False)),
    "no scale of logits": ("cohere2", with_values(logit_multiplier=1.0)),
    "norms before rotation": ("hunyuan", with_values(qk_norm="head")),
    "base without alpha": ("hunyuan", ropes_with(scaling="default")),
    "SiLU for GELU": ("starcoder2", with_values(activation="silu")),
    "no window in some layers": ("ministral", without_windows),
    "no sinks": ("gpt-oss", lambda spec: changed_attention(spec, sinks=False)),
    "no window, gpt-oss": ("gpt-oss", without_windows),
    "bounds of YaRN in whole numbers": ("gpt-oss", ropes_with(truncate=True)),
    "SiLU for the clamped activation": ("gpt-oss", lambda spec: changed_experts(spec, activation="silu")),
    "weights from a softmax over all experts": ("gpt-oss", lambda spec: changed_experts(spec, renormalise=False)),
    "no scale of queries": ("ministral3", ropes_with(query_scale=None)),
    "rotation without YaRN": ("ministral3", ropes_with(scaling="default")),
    "w for 1 + w": ("gemma3", with_norms(offset=0.0)),
    "no norms of heads": ("gemma3", with_values(qk_norm=None)),
    "rotation of windows in full layers": ("gemma3", ropes_of_layer(0)),
    "rotation of full layers in windows": ("gemma3", ropes_of_layer(2)),
    "rotation without the linear factor": ("gemma3", ropes_with(scaling="default")),
    "scores scaled by the width of heads": ("gemma3", with_scale(12**-0.5)),
    "no multiplier of the embedding": ("gemma3", with_values(embedding_multiplier=1.0)),
    "no windows beside full layers": ("gemma3", without_windows),
    "SiLU for GELU, Gemma 3": ("gemma3", with_values(activation="silu")),
    "logits without a cap": ("gemma3", with_values(logit_cap=None)),
    "w for 1 + w, Qwen3.5": ("qwen3.5", with_norms(offset=0.0)),
    "whole heads rotated": ("qwen3.5", ropes_with(rotary_dim=None)),
    "no shared expert": ("qwen3.5-moe", with_experts(shared_width=None)),
    "weights of experts not renormalised": ("qwen3.5-moe", with_experts(renormalise=False)),
    "value heads in another order": ("qwen3.5", with_deltas(key_heads=1, key_dim=32)),
    "no biases": ("gemma3-vision", with_values(qkv_bias=False, o_bias=False)),
}


def largest_error(name: str, change: Callable[[ModelSpec], ModelSpec], folder: Path) -> float:
    """Return the largest error of any logit of a model that is computed as the changed spec says."""
    reference = make_reference(name)
    save_reference(reference, folder)
    spec = change(read_model_spec(folder))
    family = family_of(spec.architecture)
    assert family is not None
    build = Build(torch.float32, torch.device("cpu"), SingleRank(), PlainFormat())
    names = family.names
    if not spec.parallel and names.before_mlp is None:
        names = replace(names, before_mlp=names.before_attention)  # the same norm once more
    model = Decoder(spec, build, replace(family, names=names))
    with Checkpoint(folder, build) as checkpoint:
        model.load(checkpoint)
    runner = HandRunner(model)
    row = HandRow(tokens=TOKENS, table=runner.blocks.table(len(TOKENS)), start=0, count=len(TOKENS))
    return (runner.run([row])[0] - reference_logits(reference, TOKENS)).abs().max().item()


@pytest.mark.parametrize("case", MISREAD)
def test_a_wrong_reading_is_noticed(case: str, tmp_path: Path) -> None:
    name, change = MISREAD[case]
    assert largest_error(name, change, tmp_path) > MIN_ERROR_LOGITS


@pytest.mark.parametrize("name", sorted({name for name, _ in MISREAD.values()}))
def test_the_right_reading_passes(name: str, tmp_path: Path) -> None:
    assert largest_error(name, lambda spec: spec, tmp_path) < 1e-4
