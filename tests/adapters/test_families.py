"""Adapters of families with experts, gates and recurrent states: what is supported works, the rest is refused."""

import pytest

from roseinfer.core.errors import ConfigError
from tests.adapters.driving import Driver, assert_close, build
from tests.adapters.test_equivalence import prompt
from tests.helpers.cases import cases
from tests.helpers.checkpoints import EXPERTS, make_reference, save_reference
from tests.helpers.gguf_files import write_model
from tests.helpers.lora_folders import linear_shapes, merge, write_adapter
from tests.helpers.mtp_reference import MtpReference

ATTENTION = r"self_attn\.[qkvo]_proj"
DELTA = r"linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)"
# Family and its layers that adapters may change.
SUPPORTED = {
    "qwen3-moe": ATTENTION,
    "qwen3-moe-dense": rf"{ATTENTION}|mlp\.(gate|up|down)_proj",
    "mixtral": ATTENTION,
    "gpt-oss": ATTENTION,
    "qwen3.5": rf"{ATTENTION}|{DELTA}|mlp\.(gate|up|down)_proj",
    "qwen3.5-moe": rf"{ATTENTION}|{DELTA}|shared_expert\.(gate|up|down)_proj",
    "qwen3-next": rf"{ATTENTION}|{DELTA}|shared_expert\.(gate|up|down)_proj",
    "gemma3": rf"{ATTENTION}|mlp\.(gate|up|down)_proj",
    "cohere2": rf"{ATTENTION}|mlp\.(gate|up|down)_proj",
    "starcoder2": rf"{ATTENTION}|mlp\.c_(fc|proj)",
}
DEFAULT = ("mixtral", "qwen3.5-moe", "gemma3", "starcoder2")
REQUESTS = [(prompt(9, 1), "one"), (prompt(17, 2), None), (prompt(6, 3), "two"), (prompt(5, 4), "one")]


@cases("family", DEFAULT, exhaustive=[family for family in SUPPORTED if family not in DEFAULT])
def test_a_mixed_batch_equals_merged_weights(family, tmp_path):
    model = save_reference(make_reference(family), tmp_path / "model")
    shapes = linear_shapes(model, modules=SUPPORTED[family])
    assert len(shapes) >= 4
    folders = {None: model}
    for seed, name in enumerate(("one", "two")):
        changes = write_adapter(tmp_path / name, shapes, rank=3 + seed, seed=seed, size=0.3)
        folders[name] = merge(model, changes, tmp_path / f"merged-{name}")
    driver = Driver(build(model, f"one={tmp_path / 'one'}", f"two={tmp_path / 'two'}"))
    for (tokens, name), found in zip(REQUESTS, driver.run(REQUESTS, chunk=8), strict=True):
        assert_close(found, Driver(build(folders[name])).run([(tokens, None)])[0])
    plain = Driver(build(model)).run([(tokens, None) for tokens, _ in REQUESTS], chunk=8)
    assert_close(driver.run(REQUESTS, chunk=8)[1], plain[1])
    if family not in EXPERTS:  # their products are of as many rows as choose an expert, which rounds in other ways
        assert driver.run(REQUESTS, chunk=8)[1] == plain[1]


def test_a_draft_head_guesses_for_rows_with_adapters(tmp_path):
    """The head itself is not adapted, and its guesses change nothing."""
    reference = make_reference("qwen3.5")
    model = save_reference(reference, tmp_path / "model")
    MtpReference(reference).add_to(model)
    shapes = linear_shapes(model, modules=SUPPORTED["qwen3.5"])
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    named = []
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, shapes, rank=3 + seed, seed=seed, size=0.3)
        named.append(f"{name}={tmp_path / name}")
    plain = Driver(build(model, *named)).run(REQUESTS, outputs=12)
    driver = Driver(build(model, *named, speculation="mtp,tokens=2"))
    for found, wanted in zip(driver.run(REQUESTS, outputs=12, ahead=2), plain, strict=True):
        assert found.tokens[:12] == wanted.tokens
    assert driver.guessed > 2 * len(REQUESTS)
    write_adapter(tmp_path / "head", {"mtp.layers.0.self_attn.q_proj": (32, 32)})
    with pytest.raises(ConfigError, match=r"no linear layer that adapters may change called mtp\.layers"):
        build(model, f"a={tmp_path / 'head'}", speculation="mtp,tokens=2")


@pytest.mark.parametrize(
    ("family", "module", "shape"),
    [
        ("qwen3-moe", "model.layers.0.mlp.experts.0.gate_proj", (20, 32)),
        ("qwen3-moe", "model.layers.0.mlp.experts", (20, 32)),
        ("qwen3-moe", "model.layers.0.mlp.gate", (6, 32)),
        ("qwen3.5", "model.layers.0.linear_attn.in_proj_b", (4, 32)),
        ("qwen3.5", "model.visual.blocks.0.attn.qkv", (48, 16)),
        ("llama3", "model.embed_tokens", (99, 32)),
        ("gpt2", "wte", (99, 32)),
    ],
)
def test_other_layers_are_refused_by_name(family, module, shape, tmp_path):
    model = save_reference(make_reference(family), tmp_path / "model")
    write_adapter(tmp_path / "a", {module: shape})
    with pytest.raises(ConfigError, match=rf"lora 'a': .*no linear layer that adapters may change called {module}$"):
        build(model, f"a={tmp_path / 'a'}")


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_gguf_model_takes_the_same_adapters(family, tmp_path):
    reference = make_reference(family)
    model = save_reference(reference, tmp_path / "model")
    changes = write_adapter(tmp_path / "one", linear_shapes(model), size=0.3)
    merged = Driver(build(merge(model, changes, tmp_path / "merged")))
    file = write_model(tmp_path / "model.gguf", reference)
    driver = Driver(build(file, f"one={tmp_path / 'one'}"))
    assert_close(driver.run([(prompt(9, 1), "one")])[0], merged.run([(prompt(9, 1), None)])[0])
