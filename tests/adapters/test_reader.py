"""Folders of adapters: what a reader applies, and what it refuses by name."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.adapters.config import MAX_PATTERNS_COUNT, MAX_REPEATING_COUNT
from roseinfer.adapters.reader import AdapterFile, LowRank, read_adapter
from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from tests.helpers.lora_folders import PREFIX, write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (6, 8), "model.layers.10.mlp.up_proj": (12, 8)}
Q, UP = SHAPES
MAX_RANK, MAX_BYTES = 16, 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path, SHAPES)
    return tmp_path


def read(folder: Path) -> AdapterFile:
    return read_adapter(folder, MAX_RANK, MAX_BYTES)


def delta(change: LowRank) -> torch.Tensor:
    return change.scale * (change.b.double() @ change.a.double())


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors, which are named with "__" in place of dots; None removes one."""
    path = folder / "adapter_model.safetensors"
    found = load_file(path)
    for name, tensor in tensors.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    save_file(found, path)


def key(module: str, side: str) -> str:
    return f"{PREFIX}{module}.lora_{side}.weight".replace(".", "__")


def test_a_change_is_scaled(folder: Path) -> None:
    wanted = write_adapter(folder, SHAPES, rank=4, alpha=5.0)
    found = read(folder)
    assert found.changes.keys() == wanted.keys() and found.rank == 4
    for module, change in found.changes.items():
        torch.testing.assert_close(delta(change), wanted[module], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_and_rslora_in_every_dtype(folder: Path, dtype: torch.dtype, rslora: bool) -> None:
    wanted = write_adapter(folder, SHAPES, ranks={"up_proj": 9}, alphas={"q_proj": 3.0}, rslora=rslora, dtype=dtype)
    found = read(folder)
    assert [found.changes[module].rank for module in (Q, UP)] == [4, 9] and found.rank == 9
    for module, change in found.changes.items():
        torch.testing.assert_close(delta(change), wanted[module], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", [Q]),
        ("self_attn.q_proj", [Q]),
        ("attn.q_proj", []),  # it must begin after a dot
        (r"layers\.0\..*", [Q]),
        (r"layers\.\d+\.mlp\.up_proj", [UP]),
        (r"model.layers.[01]+.(mlp|self_attn).[a-z_]+", [Q, UP]),
        (r"^model\.layers\.10\..*$", [UP]),
        (f"layers.({'|'.join(map(str, range(16)))}).self_attn.*", [Q]),
        (".*(self_attn|mlp).*(q|up)_proj", [Q, UP]),
        ("layers.1", []),
    ],
)
def test_patterns_match_the_end_of_a_path(folder: Path, pattern: str, matches: list[str]) -> None:
    change_config(folder, alpha_pattern={pattern: 80, ".*": 8})
    scales = {module: change.scale for module, change in read(folder).changes.items()}
    assert scales == {module: 20.0 if module in matches else 2.0 for module in SHAPES}


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+",
        "(a|b)*",
        "a{2,}",
        "(?i)q",
        "a*?b",
        ".*.*.*",
        "(",
        "x" * 201,
        r"\w+",
        "a+",
        "(a|a)" * 7,
        "(a|.*)(.*|b)(c|d)",
        "a)" + "|(a|b)" * 7 + "|(c",
    ],
)
def test_patterns_that_could_take_long_are_refused(folder: Path, pattern: str) -> None:
    change_config(folder, rank_pattern={pattern: 4})
    with pytest.raises(UnsupportedModelError, match=r"rank_pattern: the pattern .* is not"):
        read(folder)


def test_numbers_of_patterns_are_limited(folder: Path) -> None:
    change_config(folder, alpha_pattern={f"{number}.*": 1 for number in range(MAX_REPEATING_COUNT + 1)})
    with pytest.raises(UnsupportedModelError, match="alpha_pattern has more than 64 patterns"):
        read(folder)
    change_config(folder, alpha_pattern={f"layers.{number}.q": 1 for number in range(MAX_PATTERNS_COUNT + 1)})
    with pytest.raises(UnsupportedModelError, match=r"alpha_pattern is .* with up to 4096 entries"):
        read(folder)
    change_config(folder, alpha_pattern={f"layers.{number}.q": 1 for number in range(MAX_PATTERNS_COUNT)})
    assert read(folder).rank == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_qalora", True),
        ("lora_bias", True),
        ("use_bdlora", {"nblocks": 2}),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 2}),
        ("velora_config", {"x": 1}),
        ("monteclora_config", {"x": 1}),
        ("kasa_config", {"x": 1}),
        ("lora_ga_config", {"x": 1}),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [3]),
        ("layer_replication", [[0, 4]]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", 1),
        ("some_new_field", 0),
        ("some_new_field", "x"),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("r", 0),
        ("r", "8"),
        ("r", True),
        ("lora_alpha", "16"),
        ("lora_alpha", 10**400),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 1.5}),
        ("alpha_pattern", {"q_proj": None}),
    ],
)
def test_fields_that_would_change_the_result_are_refused_by_name(folder: Path, field: str, value: object) -> None:
    change_config(folder, **{field: value})
    with pytest.raises(UnsupportedModelError, match=rf"adapter_config\.json: {field}"):
        read(folder)


def test_fields_without_effect_are_ignored(folder: Path) -> None:
    before = read(folder)
    fields = {
        "auto_mapping": None,
        "base_model_name_or_path": "Qwen/Qwen3-8B",
        "corda_config": None,
        "ensure_weight_tying": True,
        "eva_config": {"rho": 2.0},
        "exclude_modules": "lm_head",
        "fan_in_fan_out": True,
        "inference_mode": True,
        "init_lora_weights": "gaussian",
        "layers_pattern": "layers",
        "layers_to_transform": [0],
        "loftq_config": {},
        "lora_dropout": 0.1,
        "megatron_config": {"x": 1},
        "megatron_core": "megatron.core",
        "peft_version": "0.18.0",
        "qalora_group_size": 16,
        "revision": "main",
        "runtime_config": {"ephemeral_gpu_offload": False},
        "target_modules": ["k_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "modules_to_save": None,
        "layer_replication": [],
        "some_new_field": False,
    }
    change_config(folder, **fields)
    after = read(folder)
    assert after.digest == before.digest and after.config.base == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.embed_tokens.lora_embedding_A", torch.ones(4, 9)),
        (f"{Q}.lora_magnitude_vector", torch.ones(6)),
        (f"{Q}.lora_magnitude_vector.weight", torch.ones(6)),
        (f"{Q}.lora_B.bias", torch.ones(6)),
        (f"{Q}.lora_A.default.weight", torch.ones(4, 8)),
        (f"{Q}.base_layer.weight", torch.ones(6, 8)),
        ("lm_head.weight", torch.ones(9, 8)),
        ("score.modules_to_save.weight", torch.ones(2, 8)),
    ],
)
def test_other_tensors_are_refused_by_name(folder: Path, name: str, tensor: torch.Tensor) -> None:
    change_tensors(folder, **{f"{PREFIX}{name}".replace(".", "__"): tensor})
    with pytest.raises(UnsupportedModelError, match=f"no matrix A or B of a linear layer: {PREFIX}{name}$"):
        read(folder)


@pytest.mark.parametrize(
    ("side", "tensor", "message"),
    [
        ("A", torch.ones(5, 8), r"is \[5, 8\], but the config says rank 4"),
        ("B", torch.ones(6, 5), r"is \[6, 5\], but the config says rank 4"),
        ("A", torch.ones(4), r"is \[4\], but"),
        ("A", torch.full((4, 8), math.nan), "holds NaN or infinity"),
        ("B", torch.full((6, 4), -math.inf), "holds NaN or infinity"),
        ("B", torch.ones(6, 4, dtype=torch.int8), "has dtype int8"),
        ("B", torch.ones(6, 4).to(torch.float8_e4m3fn), "has dtype float8_e4m3fn"),
        ("B", None, "is missing"),
        ("A", None, "is missing"),
    ],
)
def test_unusable_matrices_are_refused_by_name(folder: Path, side: str, tensor, message: str) -> None:
    change_tensors(folder, **{key(Q, side): tensor})
    with pytest.raises(UnsupportedModelError, match=rf"tensor {Q}\.lora_{side}\.weight {message}"):
        read(folder)


def test_a_rank_that_is_too_large(folder: Path) -> None:
    write_adapter(folder, SHAPES, rank=4, ranks={"q_proj": MAX_RANK})
    assert read(folder).rank == MAX_RANK
    for options in ({"rank": 17}, {"ranks": {"q_proj": 17}}):
        write_adapter(folder, SHAPES, **options)
        with pytest.raises(UnsupportedModelError, match=r"adapter_config\.json: a rank is 17, more than lora_max_rank"):
            read(folder)


def test_long_names_are_not_matched(folder: Path) -> None:
    change_tensors(folder, **{"a" * 1000 + "__lora_A__weight": torch.ones(4, 8)})
    with pytest.raises(UnsupportedModelError, match=r"no matrix A or B of a linear layer: 'a+\.\.\.$"):
        read(folder)


def test_messages_stay_short_and_printable(folder: Path) -> None:
    change_tensors(folder, **{"a\x1b[2J__lora_A__weight": torch.ones(4, 8)})
    with pytest.raises(UnsupportedModelError, match=r"linear layer: 'a\\x1b\[2J\.lora_A\.weight'$"):
        read(folder)
    change_config(folder, r=10**4000)
    with pytest.raises(UnsupportedModelError, match=r"a rank is 10{199}\.\.\., more than"):
        read(folder)


def test_names_without_the_prefix_are_the_same(folder: Path) -> None:
    before = read(folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, path)
    assert read(folder).digest == before.digest
    save_file(tensors | {name.removeprefix(PREFIX): tensor.clone() for name, tensor in tensors.items()}, path)
    with pytest.raises(UnsupportedModelError, match="is there twice"):
        read(folder)


def test_missing_and_broken_files(folder: Path) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(UnsupportedModelError, match=r"adapter_model\.safetensors: not a safetensors file"):
        read(folder)
    save_file({}, weights)
    with pytest.raises(UnsupportedModelError, match="there are no tensors"):
        read(folder)
    save_file({"a": torch.zeros(5 << 20)}, weights)
    with pytest.raises(UnsupportedModelError, match="the file has more than"):
        read(folder)
    weights.unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no adapter_model\.safetensors"):
        read(folder)
    (folder / "adapter_model.bin").write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"adapter_model\.bin is a pickle"):
        read(folder)
    config.write_text("[1]")
    with pytest.raises(UnsupportedModelError, match="does not hold a JSON object"):
        read(folder)
    config.unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no adapter_config\.json"):
        read(folder)
    with pytest.raises(ModelNotFoundError, match=r"holds no adapter_config\.json"):
        read(folder / "none")


def test_the_digest_is_that_of_the_content(folder: Path, tmp_path_factory) -> None:
    first = read(folder).digest
    copy = tmp_path_factory.mktemp("copy")
    write_adapter(copy, SHAPES)
    assert read(copy).digest == first
    digests = {first}
    for options in (
        {"seed": 1},
        {"alpha": 9.0},
        {"rslora": True},
        {"dtype": torch.bfloat16},
        {"alphas": {"q_proj": 1.0}},
    ):
        write_adapter(copy, SHAPES, **options)
        digests.add(read(copy).digest)
    write_adapter(copy, {Q: SHAPES[Q]})
    digests.add(read(copy).digest)
    assert len(digests) == 7
