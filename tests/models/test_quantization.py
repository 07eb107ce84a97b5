"""Configs of quantised checkpoints: supported forms, refusals and damage."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.errors import RoseinferError, UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from tests.helpers.int4_files import AWQ, GPTQ, PACKED, packed_config
from tests.models.test_config import QWEN3, read, write

QWEN3_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}
AUTOFP8 = {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
    "quant_method": "fp8",
    "kv_cache_scheme": "static",
}
ARGS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}
BY_TOKEN = {**ARGS, "dynamic": True, "strategy": "token", "observer": None}
COMPRESSED = {
    "config_groups": {
        "group_0": {
            "input_activations": BY_TOKEN,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": ARGS,
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head", "re:.*visual.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.11.0",
}
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "quant_algo": "FP8",
    "producer": {"name": "modelopt", "version": "0.40.0"},
    "quant_method": "modelopt",
}
MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.27.1"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


NVFP4_ARGS = {**ARGS, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
NVFP4 = {
    **COMPRESSED,
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": {**NVFP4_ARGS, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"},
            "targets": ["Linear"],
            "weights": NVFP4_ARGS,
        }
    },
}
MODELOPT_NVFP4 = {**MODELOPT, "quant_algo": "NVFP4", "group_size": 16}


def nvfp4(part: str, **changes: Any) -> dict[str, Any]:
    path = f"config_groups.group_0.{part}"
    return changed(NVFP4, path, {**NVFP4["config_groups"]["group_0"][part], **changes})


RULES = {**GPTQ, "dynamic": {"-:.*lm_head.*": {}, r"+:.*\.down_proj$": {"group_size": 64, "sym": True}}}


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the field at `path` (keys joined by dots) set."""
    data = copy.deepcopy(data)
    *outer, last = path.split(".")
    inner = data
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return data


def weights(**changes: Any) -> dict[str, Any]:
    return changed(COMPRESSED, "config_groups.group_0.weights", {**ARGS, **changes})


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (QWEN3_FP8, "block"),
        ({**QWEN3_FP8, "scale_fmt": None}, "block"),
        (AUTOFP8, "tensor"),
        (COMPRESSED, "channel"),
        (weights(strategy="tensor"), "tensor"),
        (weights(strategy="block", block_structure=[128, 128]), "block"),
        (weights(strategy="block", block_structure="128x128"), "block"),
        (changed(COMPRESSED, "config_groups.group_0.input_activations", None), "channel"),
        (changed(COMPRESSED, "kv_cache_scheme", {**ARGS, "strategy": "tensor"}), "channel"),
        (MODELOPT, "tensor"),
        ({**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "channel"),
        ({"quant_method": "modelopt", **MODELOPT_FILE}, "tensor"),
    ],
)
def test_forms_of_config_json(tmp_path: Path, config: dict[str, Any], layout: str) -> None:
    found = read(tmp_path, QWEN3, quantization_config=config).quantization
    assert found is not None and found.layout == layout
    assert found.ignores("lm_head") and not found.ignores("model.layers.0.mlp.up_proj")


def test_modelopts_own_file(tmp_path: Path) -> None:
    write(tmp_path, MODELOPT_FILE, "hf_quant_config.json")
    assert read(tmp_path, QWEN3).quantization == Fp8Scheme("tensor", ("lm_head",))
    # config.json describes the same tensors in more detail.
    assert read(tmp_path, QWEN3, quantization_config=QWEN3_FP8).quantization == Fp8Scheme(
        "block", ("lm_head", "model.layers.0.input_layernorm")
    )


SMALL, LARGE = Int4Groups(32, symmetric=False), Int4Groups(128, symmetric=True)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (AWQ, Int4Scheme("awq", SMALL)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, Int4Scheme("awq", SMALL)),
        ({**AWQ, "backend": "marlin", "do_fuse": True, "sym": True}, Int4Scheme("awq", SMALL)),
        ({**AWQ, "group_size": -1}, Int4Scheme("awq", Int4Groups(None, symmetric=False))),
        ({**AWQ, "modules_to_not_convert": ["visual"]}, Int4Scheme("awq", SMALL, ignored=("visual",))),
        (GPTQ, Int4Scheme("gptq", SMALL)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Int4Scheme("gptq", LARGE)),
        (
            {**GPTQ, "checkpoint_format": "gptq_v2", "static_groups": True, "desc_act": True},
            Int4Scheme("gptq_v2", SMALL),
        ),
        ({**GPTQ, "checkpoint_format": None, "format": "gptq_v2"}, Int4Scheme("gptq_v2", SMALL)),
        (PACKED, Int4Scheme("pack-quantized", Int4Groups(32, symmetric=True), ignored=("lm_head",))),
        (
            packed_config(group_size=64, symmetric=False, actorder="group", zp_dtype="torch.int8"),
            Int4Scheme("pack-quantized", Int4Groups(64, symmetric=False), ignored=("lm_head",)),
        ),
        (
            packed_config(strategy="channel", group_size=None, actorder="static"),
            Int4Scheme("pack-quantized", Int4Groups(None, symmetric=True), ignored=("lm_head",)),
        ),
        (
            {**PACKED, "kv_cache_scheme": {**ARGS, "strategy": "tensor"}},
            Int4Scheme("pack-quantized", Int4Groups(32, symmetric=True), ignored=("lm_head",)),
        ),
    ],
)
def test_forms_of_four_bits(tmp_path: Path, config: dict[str, Any], scheme: Int4Scheme) -> None:
    assert read(tmp_path, QWEN3, quantization_config=config).quantization == scheme


def test_layers_that_gptq_quantises_otherwise(tmp_path: Path) -> None:
    scheme = read(tmp_path, QWEN3, quantization_config=RULES).quantization
    assert isinstance(scheme, Int4Scheme)
    assert scheme.groups_of("model.layers.0.mlp.down_proj") == Int4Groups(64, symmetric=True)
    assert scheme.groups_of("model.layers.0.mlp.up_proj") == SMALL
    assert scheme.ignores("lm_head") and not scheme.ignores("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("file", "config", "layout"),
    [("quant_config.json", AWQ, "awq"), ("quantize_config.json", {**GPTQ, "quant_method": None}, "gptq")],
)
def test_files_of_other_tools(tmp_path: Path, file: str, config: dict[str, Any], layout: str) -> None:
    write(tmp_path, config, file)
    assert read(tmp_path, QWEN3).quantization == Int4Scheme(layout, SMALL)
    write(tmp_path, {**config, "bits": 3}, file)
    with pytest.raises(UnsupportedModelError, match=rf"{file}: bits = 3 is not supported; known: 4"):
        read(tmp_path, QWEN3)


def rules(**of: Any) -> dict[str, Any]:
    return {**GPTQ, "dynamic": of}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**AWQ, "bits": 8}, "bits = 8 is not supported; known: 4"),
        ({"quant_method": "awq", "w_bit": 3, "group_size": 32}, "w_bit = 3"),
        ({"quant_method": "awq", "group_size": 32}, "w_bit = None"),
        ({**AWQ, "group_size": 16}, "group_size = 16 is not supported; known: 32, 64, 128, -1"),
        ({**AWQ, "group_size": True}, "group_size = True"),
        ({**AWQ, "group_size": None}, "q_group_size = None"),
        *[({**AWQ, "version": kind}, f"version = '{kind}'") for kind in ("gemv", "gemv_fast", "marlin", "exllama")],
        ({**AWQ, "backend": "llm-awq"}, "backend = 'llm-awq'"),
        ({**AWQ, "version": "llm-awq"}, "version = 'llm-awq'"),
        ({**AWQ, "checkpoint_format": "gemv"}, "checkpoint_format = 'gemv'"),
        ({**AWQ, "zero_point": False}, "zero_point = False"),
        ({**AWQ, "rotation": "hadamard"}, "rotation = 'hadamard'.*unknown"),
        ({**GPTQ, "bits": 8}, "bits = 8"),
        ({**GPTQ, "group_size": 1024}, "group_size = 1024"),
        *[
            ({**GPTQ, "checkpoint_format": kind}, f"checkpoint_format = '{kind}'")
            for kind in ("marlin", "bitblas", "gptq_p")
        ],
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format = True"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype = 'int16'"),
        ({**GPTQ, "sym": "no"}, "sym = 'no'.*true or false"),
        ({**GPTQ, "adapter": {"rank": 8}}, "adapter = {'rank': 8}.*unknown"),
        (rules(**{"+:.*down.*": {"bits": 8}}), r"dynamic '\+:\.\*down\.\*': bits = 8 is not supported; known: 4"),
        (rules(down={"group_size": 16}), "dynamic 'down': group_size = 16"),
        (rules(down={"rotation": "hadamard"}), "dynamic 'down': rotation = 'hadamard'.*unknown"),
        (rules(down=4), "dynamic = {'down': 4}"),
        (rules(**{"-:(": {}}), r"dynamic = 're:\('.*invalid regular expression"),
        ({**GPTQ, "dynamic": ["-:lm_head"]}, r"dynamic = \['-:lm_head'\]"),
        (packed_config(num_bits=8), "weights: num_bits = 8 is not supported; it is 4 here"),
        (packed_config(type="float"), "weights: type = 'float' is not supported; it is int here"),
        (packed_config(dynamic=True), "weights: dynamic = True"),
        (packed_config(strategy="block"), "weights: strategy = 'block'.*known: group, channel"),
        (packed_config(strategy=None), "weights: strategy = None"),
        (packed_config(group_size=16), "weights: group_size = 16"),
        (packed_config(strategy="channel", group_size=128), "weights: group_size = 128"),
        (packed_config(actorder="random"), "weights: actorder = 'random'"),
        (packed_config(symmetric="no"), "weights: symmetric = 'no'"),
        (
            changed(PACKED, "config_groups.group_0.input_activations", {**BY_TOKEN, "type": "int"}),
            "group_0: input_activations = {.*activations are not rounded with weights in four bits",
        ),
        (changed(PACKED, "config_groups.group_0.output_activations", BY_TOKEN), "output_activations"),
        (changed(PACKED, "config_groups.group_0.format", "float-quantized"), "group_0: format = 'float-quantized'"),
        (
            changed(PACKED, "config_groups.group_1", packed_config(group_size=64)["config_groups"]["group_0"]),
            "config_groups = .*share scales alike",
        ),
        (changed(PACKED, "transform_config", {"config_groups": {"R1": {}}}), "transform_config"),
    ],
)
def test_other_four_bits_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config.json.*{message}"):
        read(tmp_path, QWEN3, quantization_config=config)


@pytest.mark.parametrize("nothing", [None, {}])
def test_floats(tmp_path: Path, nothing: Any) -> None:
    assert read(tmp_path, QWEN3, quantization_config=nothing).quantization is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method = 'hqq' is not supported; known: fp8, compressed-tensors"),
        ({"quant_method": ["fp8"]}, r"quant_method = \['fp8'\]"),
        ("fp8", "quantization_config = 'fp8'"),
        ([], r"quantization_config = \[\]"),
        (False, "quantization_config = False"),
        ({**QWEN3_FP8, "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({**QWEN3_FP8, "scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
        ({**QWEN3_FP8, "weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\].*128 x 128"),
        ({**QWEN3_FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        ({**QWEN3_FP8, "rotation": "hadamard"}, "rotation = 'hadamard'.*unknown"),
        (changed(COMPRESSED, "format", "marlin-24"), "format = 'marlin-24'"),
        (changed(COMPRESSED, "format", "mxfp4-pack-quantized"), "format = 'mxfp4-pack-quantized'"),
        (changed(COMPRESSED, "format", "nvfp4-pack-quantized"), "weights: num_bits = 8 is not supported; it is 4"),
        (nvfp4("weights", group_size=32), "weights: group_size = 32 is not supported; it is 16"),
        (nvfp4("weights", strategy="group"), "weights: strategy = 'group'"),
        (nvfp4("weights", dynamic="local"), "weights: dynamic = 'local'"),
        (nvfp4("input_activations", num_bits=8), "input_activations: num_bits = 8"),
        ({**MODELOPT_NVFP4, "group_size": 32}, "group_size = 32"),
        (changed(COMPRESSED, "format", "pack-quantized"), "input_activations = {.*activations are not rounded"),
        (changed(COMPRESSED, "config_groups", {}), "config_groups is missing"),
        (changed(COMPRESSED, "config_groups.group_0.weights", None), "weights is missing"),
        (weights(num_bits=4), "num_bits = 4 is not supported; it is 8"),
        (weights(type="int"), "type = 'int' is not supported; it is float"),
        (weights(strategy="group", group_size=128), "strategy = 'group'"),
        (weights(strategy="block", block_structure=[64, 64]), r"block_structure = \[64, 64\]"),
        (weights(symmetric=False), "symmetric = False"),
        (weights(dynamic=True), "dynamic = True"),
        (weights(actorder="static"), "actorder = 'static'"),
        (changed(COMPRESSED, "config_groups.group_0.input_activations.num_bits", 4), "input_activations: num_bits = 4"),
        (changed(COMPRESSED, "config_groups.group_0.output_activations", BY_TOKEN), "output_activations"),
        (
            changed(COMPRESSED, "config_groups.group_1", {"weights": {**ARGS, "strategy": "tensor"}}),
            "share scales alike",
        ),
        (changed(COMPRESSED, "transform_config", {"config_groups": {"R1": {}}}), "transform_config"),
        (changed(COMPRESSED, "sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config"),
        (changed(COMPRESSED, "kv_cache_scheme", {**ARGS, "num_bits": 4}), "kv_cache_scheme: num_bits = 4"),
        (
            changed(COMPRESSED, "ignore", ["re:("]),
            r"ignore = 're:\(' is not supported; .*invalid regular expression: missing \)",
        ),
        (changed(COMPRESSED, "ignore", ["re:" + "(" * 5000 + ")" * 5000]), "invalid regular expression"),
        (changed(COMPRESSED, "ignore", ["re:a{1,99999999999}"]), "invalid regular expression"),
        ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ' is not supported; known: FP8"),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, "quant_algo = 'W4A16_AWQ'"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "quant_algo = 'MIXED_PRECISION'"),
        ({**MODELOPT, "quantized_layers": {"a": {}}}, "quantized_layers"),
        (changed({"quant_method": "modelopt", **MODELOPT_FILE}, "quantization.group_size", 16), "group_size = 16"),
    ],
)
def test_everything_else_is_refused_by_name(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config.json.*{message}"):
        read(tmp_path, QWEN3, quantization_config=config)


def test_the_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, changed(MODELOPT_FILE, "quantization.quant_algo", "W4A8_AWQ"), "hf_quant_config.json")
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json quantization: quant_algo = 'W4A8_AWQ'"):
        read(tmp_path, QWEN3)


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("lm_head", ["lm_head", "model.lm_head"], ["model.layers.0.lm_header"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj", "layers.1.mlp.up_proj"], ["model.layers.10.mlp.up_proj"]),
        ("layers.1.mlp.up_proj", ["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_projection"]),
        ("up_proj", ["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.gate_up_proj"]),
        ("*.mlp.*", ["model.layers.1.mlp.up_proj"], ["model.layers.1.self_attn.q_proj"]),
        ("model.layers.1*", ["model.layers.1.mlp.up_proj", "layers.12.mlp.up_proj"], ["model.layers.2.mlp.up_proj"]),
        (r"re:.*layers\.[01]\..*_proj$", ["model.layers.1.mlp.up_proj"], ["model.layers.2.mlp.up_proj"]),
        ("re:visual", ["visual", "visual.blocks.3.attn.qkv"], ["model.visual.merger"]),
        (r"re:(?!.*lm_head).*mlp\.(up|gate)_proj", ["model.layers.1.mlp.up_proj"], ["lm_head", "layers.1.mlp.gate"]),
        ("re:.*visual.*|.*lm_head", ["model.visual.merger", "lm_head"], ["model.layers.1.mlp.gate"]),
    ],
)
def test_names_of_layers_that_are_ignored(pattern: str, matched: list[str], others: list[str]) -> None:
    scheme = Fp8Scheme("block", ("model.embed_tokens", pattern))
    assert [scheme.ignores(name) for name in matched + others] == [True] * len(matched) + [False] * len(others)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container within, and a key of it."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from places(value)


DAMAGE = [None, True, 0, -1, 8, 1e30, float("nan"), "", "re:[", "float", [], [[]], {}, {"a": {}}, [128, 128], ["*"]]


@pytest.mark.parametrize(
    "config", [QWEN3_FP8, AUTOFP8, COMPRESSED, MODELOPT, {"quant_method": "modelopt"}, AWQ, RULES, PACKED, NVFP4]
)
def test_damage_is_read_or_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """Put values of every kind into every field."""
    rng = random.Random(0)
    outcomes = set()
    for _ in range(150):
        damaged = copy.deepcopy(config)
        for _ in range(rng.randint(1, 2)):
            container, key = rng.choice(list(places(damaged)))
            container[key] = rng.choice(DAMAGE)
        write(tmp_path, {**QWEN3, "quantization_config": damaged})
        write(tmp_path, {**damaged, "quantization": damaged}, "hf_quant_config.json")
        try:
            scheme = read_model_spec(tmp_path).quantization
        except RoseinferError as error:
            assert "quant" in str(error)
            outcomes.add("refused")
        else:
            assert scheme is None or isinstance(scheme.ignores("model.layers.0.mlp.up_proj"), bool)
            if isinstance(scheme, Int4Scheme):
                assert scheme.groups_of("model.layers.0.mlp.up_proj").size in (32, 64, 128, None)
            json.dumps(None if scheme is None else [scheme.layout, scheme.ignored])
            outcomes.add("read")
    assert "refused" in outcomes
