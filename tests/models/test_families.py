"""Configs of families: both spellings, defaults and refused fields; and wrong readings, which change the logits."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.models.families import family_of, register
from roseinfer.models.spec import LayerSpec, ModelSpec
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, reference_logits, save_reference
from tests.helpers.loaded import load

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "max_position_embeddings": 16384,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "rope_theta": 20000.0,
    "torch_dtype": "bfloat16",
}
SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [1.0, 4.0, 9.0, 16.0]
YARN = {"factor": 8.0, "original_max_position_embeddings": 2048, "rope_type": "yarn"}
MULTIPLIERS = {
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
}
# name -> (config class of transformers, config in the older spelling, with as few fields as possible)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3Config", {**SIZES, "architectures": ["Phi3ForCausalLM"], "sliding_window": 2047}),
    "phi4-mini": (
        "Phi3Config",
        {
            **SIZES,
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 80,
            "partial_rotary_factor": 0.8,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
            "original_max_position_embeddings": 4096,
            "sliding_window": 262144,
            "full_attention_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3Config", {**SIZES, "architectures": ["SmolLM3ForCausalLM"]}),
    "smollm3-list": (
        "SmolLM3Config",
        {
            **SIZES,
            "architectures": ["SmolLM3ForCausalLM"],
            "no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 512,
            "max_window_layers": 28,
        },
    ),
    "granite": ("GraniteConfig", {**SIZES, **MULTIPLIERS, "architectures": ["GraniteForCausalLM"]}),
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            **SIZES,
            **MULTIPLIERS,
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["attention"] * 8,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 112,
        },
    ),
    "olmo2": ("Olmo2Config", {**SIZES, "architectures": ["Olmo2ForCausalLM"]}),
    "olmo3": (
        "Olmo3Config",
        {**SIZES, "architectures": ["Olmo3ForCausalLM"], "rope_theta": 500000, "rope_scaling": YARN},
    ),
    "seed-oss": ("SeedOssConfig", {**SIZES, "architectures": ["SeedOssForCausalLM"]}),
    "exaone4": ("Exaone4Config", {**SIZES, "architectures": ["Exaone4ForCausalLM"], "num_attention_heads": 32}),
    "exaone4-full": (
        "Exaone4Config",
        {
            **SIZES,
            "architectures": ["Exaone4ForCausalLM"],
            "num_key_value_heads": 8,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": [FULL] * 8,
        },
    ),
    "glm4": ("Glm4Config", {**SIZES, "architectures": ["Glm4ForCausalLM"]}),
    "gpt-oss": (
        "GptOssConfig",
        {
            **SIZES,
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "rope_scaling": {**YARN, "truncate": False},
        },
    ),
}


def write(folder: Path, data: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def read(folder: Path, name: str, **changes: Any) -> ModelSpec:
    return read_model_spec(write(folder, {**CONFIGS[name][1], **changes}))


def ropes(spec: ModelSpec) -> list[RopeSpec | None]:
    return [layer.rope for layer in spec.layers]


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_spelling_with_all_defaults_means_the_same(name: str, tmp_path: Path) -> None:
    """Let transformers rewrite the config: it fills in its own defaults and writes `rope_parameters`."""
    config_class, data = CONFIGS[name]
    expected = read(tmp_path, name)
    getattr(transformers, config_class).from_dict(deepcopy(data)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_theta" not in saved
    assert read_model_spec(tmp_path) == expected


def test_long_contexts_of_phi_have_other_factors(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["phi4-mini"][1])
    long, short = (read_model_spec(folder, length).layers[0].rope for length in (4097, 4096))
    assert long is not None and long.rotary_dim == 8 and long.divisors == tuple(LONG)
    assert short is not None and short.magnitude == pytest.approx((1 + 2 / 12) ** 0.5)
    assert long == replace(short, divisors=tuple(LONG))
    assert read(tmp_path, "phi3").windows == (2047,) * 8


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_older_names_of_longrope(older: str, tmp_path: Path) -> None:
    scaling = {"type": older, "short_factor": SHORT, "long_factor": LONG}
    expected = read(tmp_path, "phi4-mini")
    assert read(tmp_path, "phi4-mini", rope_scaling=scaling) == expected
    assert read(tmp_path, "phi4-mini", rope_scaling={**scaling, "rope_type": "longrope"}) == expected


@pytest.mark.parametrize("name", ["phi4-mini", "seed-oss"])
def test_the_context_in_use_chooses_the_rotations_of_longrope(name: str, tmp_path: Path) -> None:
    scaling = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 4096}
    if name == "seed-oss":
        changes["head_dim"] = 8
    write(tmp_path, {**CONFIGS[name][1], **changes})
    for context, factors in ((4096, SHORT), (4097, LONG), (None, LONG)):
        assert {rope and rope.divisors for rope in ropes(read_model_spec(tmp_path, context))} == {tuple(factors)}


def test_layers_of_smollm3_without_rotation(tmp_path: Path) -> None:
    rope = RopeSpec(theta=20000.0)
    spec = read(tmp_path, "smollm3")
    assert ropes(spec) == [rope, rope, rope, None] * 2
    assert spec.tied_embeddings and spec.attention[0].kv_heads == 4
    assert ropes(read(tmp_path, "smollm3", no_rope_layer_interval=3)) == [*[rope, rope, None] * 2, rope, rope]
    spec = read(tmp_path, "smollm3-list")
    assert ropes(spec) == [rope, None, *[rope] * 5, None]
    assert spec.windows == (None, 512, *[None] * 5, 512)


@pytest.mark.parametrize("name", ["granite", "granite4"])
def test_multipliers_of_granite(name: str, tmp_path: Path) -> None:
    spec = read(tmp_path, name)
    found = spec.attention[0].scale, spec.embedding_multiplier, spec.residual_multiplier, spec.logit_multiplier
    assert found == (0.0078125, 12.0, 0.22, 0.0625)
    assert spec.intermediate_size == (112 if name == "granite4" else 96)


def test_granite_4_may_have_no_rotation(tmp_path: Path) -> None:
    assert ropes(read(tmp_path, "granite4", position_embedding_type="nope")) == [None] * 8


def test_only_full_layers_of_olmo_3_scale_their_rotation(tmp_path: Path) -> None:
    spec = read(tmp_path, "olmo3")
    plain = RopeSpec(theta=500000.0)
    full = spec.layers[3].rope
    assert full is not None and (full.scaling, full.factor) == ("yarn", 8.0)
    assert ropes(spec) == [plain, plain, plain, full] * 2
    assert spec.windows == (4096, 4096, 4096, None) * 2
    only_full = {FULL: {**YARN, "rope_theta": 500000.0}}
    assert read(tmp_path, "olmo3", rope_scaling=None, rope_parameters=only_full) == spec


def test_full_layers_of_exaone_4_rotate_only_without_windows(tmp_path: Path) -> None:
    rope = RopeSpec(theta=20000.0)
    spec = read(tmp_path, "exaone4")
    assert ropes(spec) == [rope, rope, rope, None] * 2
    assert spec.windows == (4096, 4096, 4096, None) * 2
    short = read_model_spec(tmp_path, max_model_len=4096)
    assert ropes(short) == ropes(spec) and short.windows == ()
    spec = read(tmp_path, "exaone4-full")
    assert (ropes(spec), spec.windows) == ([rope] * 8, ())
    assert read(tmp_path, "exaone4-full", layer_types=None) == spec  # transformers divides by zero


def test_biases_and_heads(tmp_path: Path) -> None:
    seed, glm = read(tmp_path, "seed-oss"), read(tmp_path, "glm4")
    assert (seed.qkv_bias, seed.o_bias, seed.mlp_bias) == (True, False, False)
    assert (seed.attention[0].kv_heads, seed.attention[0].head_dim) == (8, 128)
    assert read(tmp_path, "seed-oss", head_dim=None, num_key_value_heads=None).attention[0].head_dim == 8
    assert (glm.qkv_bias, glm.o_bias) == (True, False)
    assert glm.layers[0].rope == RopeSpec(theta=20000.0, interleaved=True, rotary_dim=64)
    assert (glm.attention[0].kv_heads, glm.attention[0].head_dim, glm.norm.eps) == (2, 128, 1.5625e-7)


REFUSED = [
    ("phi3", "attention_bias", True),
    ("phi3", "lm_head_bias", True),
    ("phi3", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("phi4-mini", "interpolate_factor", 2),
    ("phi4-mini", "partial_rotary_factor", 0.7),
    ("phi4-mini", "rope_scaling", {"type": "su", "rope_type": "default"}),
    ("phi4-mini", "original_max_position_embeddings", "4096"),
    ("smollm3", "no_rope_layers", [1, 1, 1]),
    ("smollm3", "no_rope_layers", [2] * 8),
    ("smollm3", "layer_types", [SLIDING] * 8),
    ("granite", "attention_multiplier", "small"),
    ("granite", "logits_scaling", 0),
    ("granite4", "num_local_experts", 4),
    ("granite4", "layer_types", ["attention"] * 7 + ["mamba"]),
    ("granite4", "layer_types", None),
    ("granite4", "position_embedding_type", "alibi"),
    ("olmo2", "clip_qkv", 8.0),
    ("olmo3", "layer_types", ["chunked_attention"] * 8),
    ("seed-oss", "attention_out_bias", "yes"),
    ("exaone4", "sliding_window_pattern", "LLLG"),
    ("exaone4-full", "layer_types", [SLIDING] * 8),
    ("glm4", "partial_rotary_factor", 1.5),
    *((name, "new_trick", 0.5) for name in CONFIGS),
]


@pytest.mark.parametrize(
    ("name", "key", "value"), REFUSED, ids=[f"{name}-{key}={value}" for name, key, value in REFUSED]
)
def test_fields_that_change_the_result_are_refused_by_name(name: str, key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        read(tmp_path, name, **{key: value})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({**YARN, "rope_theta": 1e4}, "rope_parameters"),
        ({FULL: YARN, SLIDING: 1.0}, SLIDING),
        ({FULL: YARN, SLIDING: {"rope_type": "default", "mscale": 2.0}}, "mscale"),
    ],
)
def test_rotations_by_layer_that_are_refused(parameters: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(tmp_path, "olmo3", rope_scaling=None, rope_parameters=parameters)


def test_the_original_context_of_phi_has_one_value(tmp_path: Path) -> None:
    inner = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    for original, outer in ((4096, 2048), (2048, None)):
        scaling = {**inner, "original_max_position_embeddings": original}
        with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings"):
            read(tmp_path, "phi4-mini", rope_scaling=scaling, original_max_position_embeddings=outer)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}, "original_max_position_embeddings = 1"),
        ({**YARN, "rope_theta": 1.0, "original_max_position_embeddings": 64}, "rope_theta = 1.0"),
    ],
)
def test_scalings_that_divide_by_zero(scaling: dict[str, Any], named: str, tmp_path: Path) -> None:
    changes = {"original_max_position_embeddings": 1, "rope_scaling": None, "rope_parameters": scaling}
    with pytest.raises(UnsupportedModelError, match=named):
        read(tmp_path, "phi4-mini" if "short_factor" in scaling else "granite", **changes)


# --- wrong readings ---------------------------------------------------------------------------------------------------
def with_ropes(spec: ModelSpec, change: Callable[[LayerSpec], RopeSpec | None]) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, rope=change(layer)) for layer in spec.layers))


def changed_rope(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return with_ropes(spec, lambda layer: layer.rope and replace(layer.rope, **changes))


def without_norm_after_mlp(spec: ModelSpec) -> ModelSpec:
    """Return the spec as that of a family without the norm after feed-forward networks."""
    family = family_of(spec.architecture)
    assert family is not None
    name = f"{spec.architecture}WithoutNorm"
    names, unread = replace(family.names, after_mlp=None), (rf".*\.{family.names.after_mlp}\.weight",)
    register(replace(family, architectures=(name,), names=names, ignored=unread))
    return replace(spec, architecture=name)


WRONG: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "halves for pairs": ("glm4", lambda spec: changed_rope(spec, interleaved=False)),
    "a whole head for half": ("glm4", lambda spec: changed_rope(spec, rotary_dim=None)),
    "a whole head for a part": ("phi4-mini", lambda spec: changed_rope(spec, rotary_dim=None)),
    "factors of short contexts": ("phi3-long", lambda spec: changed_rope(spec, divisors=(1.0, 1.1, 1.2, 1.3))),
    "no magnitude": ("phi3-long", lambda spec: changed_rope(spec, magnitude=1.0)),
    "all layers rotate": ("smollm3", lambda spec: with_ropes(spec, lambda _: spec.layers[0].rope)),
    "full layers rotate": ("exaone4", lambda spec: with_ropes(spec, lambda _: spec.layers[0].rope)),
    "all layers scaled": ("olmo3", lambda spec: with_ropes(spec, lambda _: spec.layers[3].rope)),
    "no layer scaled": ("olmo3", lambda spec: with_ropes(spec, lambda _: spec.layers[0].rope)),
    "no norm after a part": ("olmo2", without_norm_after_mlp),
    "three norms for four": ("glm4", without_norm_after_mlp),
    "no multiplier": ("granite", lambda spec: replace(spec, residual_multiplier=1.0)),
}


def logits_of(folder: Path, spec: ModelSpec, tokens: list[int]) -> torch.Tensor:
    model = load(folder, spec)
    runner = HandRunner(model)
    table = runner.blocks.table(len(tokens))
    return runner.run([HandRow(tokens=tokens, table=table, start=0, count=len(tokens))])[0]


@pytest.mark.parametrize("reading", WRONG)
def test_wrong_readings_change_the_logits(reading: str, tmp_path: Path) -> None:
    name, change = WRONG[reading]
    reference, tokens = make_reference(name), list(range(3, 43))
    folder = save_reference(reference, tmp_path)
    spec, expected = read_model_spec(folder), reference_logits(reference, tokens)
    torch.testing.assert_close(logits_of(folder, spec, tokens), expected, rtol=0, atol=1e-4)
    assert (logits_of(folder, change(spec), tokens) - expected).abs().max() > 0.01


def test_short_contexts_of_phi_have_the_short_factors(tmp_path: Path) -> None:
    """Compare a context in which transformers, too, has the factors of short contexts: its original one."""
    reference, tokens = make_reference("phi3-long"), [5, 80, 33, 2]
    folder = save_reference(reference, tmp_path)
    expected = reference_logits(reference, tokens)
    short, long = (logits_of(folder, read_model_spec(folder, length), tokens) for length in (4, 5))
    torch.testing.assert_close(short, expected, rtol=0, atol=1e-4)
    assert (long - expected).abs().max() > 0.01
