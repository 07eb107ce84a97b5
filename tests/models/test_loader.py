import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import Checkpoint, resolve_dtype
from roseinfer.parallel.group import Share
from roseinfer.quant import experts
from roseinfer.quant.finite import FiniteCheck
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, reference_logits, save_reference
from tests.helpers.loaded import load as load_checkpoint
from tests.helpers.weights import BUILD

CPU = torch.device("cpu")
TOKENS = [5, 17, 3, 88, 42, 9, 1, 60]


def load(folder: Path, load_format: str = "auto", seed: int = 0, dtype: str = "auto") -> CausalLM:
    spec = read_model_spec(folder)
    return load_checkpoint(folder, spec, dtype=dtype, load_format=load_format, seed=seed)


def logits(model: CausalLM, tokens: list[int] = TOKENS) -> torch.Tensor:
    runner = HandRunner(model)
    count = len(tokens)
    return runner.run([HandRow(tokens=tokens, table=runner.blocks.table(count), start=0, count=count)])[0]


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_reference(make_reference("llama"), tmp_path)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    reference = make_reference("qwen3")
    save_reference(reference, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(load(tmp_path)), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)


def test_gpt2_as_on_the_hub(tmp_path: Path) -> None:
    """Check a checkpoint without a prefix and with the causal masks as tensors."""
    reference = make_reference("gpt2")
    save_reference(reference, tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(2)}
        return {name.removeprefix("transformer."): t for name, t in tensors.items()} | masks

    rewrite(tmp_path, rename)
    torch.testing.assert_close(logits(load(tmp_path)), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)


def test_a_tied_checkpoint_may_contain_the_head(tmp_path: Path) -> None:
    reference = make_reference("llama-tied")
    save_reference(reference, tmp_path)
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    torch.testing.assert_close(logits(load(tmp_path)), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)


def test_missing_unexpected_and_misshaped_tensors_are_named(llama: Path) -> None:
    whole = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def refuse(tensors: dict[str, torch.Tensor], match: str) -> None:
        save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UnsupportedModelError, match=match):
            load(llama)

    refuse({key: t for key, t in whole.items() if key != name}, rf"{name} is missing")
    refuse({key: t for key, t in whole.items() if key != "lm_head.weight"}, r"lm_head\.weight is missing")
    refuse({**whole, name: torch.zeros(3, 32)}, rf"{name} is \[3, 32\]")
    refuse({**whole, name: torch.zeros(48, 32, dtype=torch.int8)}, rf"{name} has dtype I8")
    refuse({**whole, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, r"layers\.0\.self_attn\.q_proj\.bias")
    refuse({**whole, "model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}, r"layers\.2\.mlp\.up_proj")


def test_weights_that_may_not_be_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads files of any mode, so the system's error is raised here."""
    opened = Path.open

    def open_(path: Path, *how: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *how)

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors cannot be read: Permission denied$"):
        load(llama)


def test_folders_without_weights(llama: Path) -> None:
    size = (llama / "model.safetensors").stat().st_size
    (llama / "model.safetensors").write_bytes(b"\x10\x00\x00\x00not safetensors".ljust(size))
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        load(llama)
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="neither model"):
        load(llama)


@pytest.mark.parametrize("name", ["gone.safetensors", "../model.safetensors"])
def test_an_index_names_files_of_its_folder_only(llama: Path, name: str) -> None:
    (llama / "inner").mkdir()
    for file in ("config.json",):
        (llama / "inner" / file).write_text((llama / file).read_text())
    index = {"weight_map": {"lm_head.weight": name}}
    (llama / "inner" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=name):
        load(llama / "inner")


def test_broken_index(llama: Path) -> None:
    for text in ("{", "[]", "{}", '{"weight_map": [1]}'):
        (llama / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match="index"):
            load(llama)


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "gpt2"])
def test_a_steady_text_depends_on_the_last_token_only(tmp_path: Path, family: str) -> None:
    save_reference(make_reference(family), tmp_path)
    spec = read_model_spec(tmp_path)
    for steady in (True, False):
        model = load_checkpoint(tmp_path, spec, dtype="auto", load_format="dummy", seed=1, steady_text=steady)
        position = len(TOKENS) - 1  # GPT-2 adds it to its embeddings
        others = logits(model, [*TOKENS[position:0:-1], TOKENS[-1]])[-1]
        assert torch.allclose(logits(model)[-1], others, atol=1e-6) == steady
        if steady and family == "llama":
            assert logits(model).argmax(-1).tolist() == [token + 1 for token in TOKENS]


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_dummy_weights_need_no_file_and_follow_the_seed(tmp_path: Path, family: str) -> None:
    make_reference(family).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = {"gpt2": "GPT2LMHeadModel", "qwen3": "Qwen3ForCausalLM"}[family]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    first, again, other = (logits(load(tmp_path, "dummy", seed)) for seed in (1, 1, 2))
    assert first.isfinite().all() and first.std() > 0
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_auto_dtype(llama: Path) -> None:
    spec = read_model_spec(llama)
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    half = read_model_spec(llama)
    assert resolve_dtype(half, "auto", CPU) is torch.float32
    assert resolve_dtype(half, "auto", torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype(spec, "auto", torch.device("cuda")) is torch.float32
    assert resolve_dtype(spec, "float16", CPU) is torch.float16


def test_weights_are_converted_while_they_load(llama: Path) -> None:
    reference = make_reference("llama")
    rewrite(llama, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    model = load(llama)
    assert model.dtype is torch.float32
    torch.testing.assert_close(logits(model), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)


def part_of(folder: Path, name: str, *shard: Share, transposed: bool = False) -> torch.Tensor:
    into = torch.full([part.width for part in shard], torch.nan)
    with Checkpoint(folder, BUILD) as checkpoint:
        checkpoint.read(name, into, shard=shard, transposed=transposed)
    return into


def test_a_part_of_a_tensor(llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    whole = load_file(llama / "model.safetensors")[name]
    rows, columns = Share(16, 8, 48), Share(4, 20, 32)
    assert torch.equal(part_of(llama, name, rows, Share(0, 32, 32)), whole[16:24])
    assert torch.equal(part_of(llama, name, rows, columns), whole[16:24, 4:24])
    assert torch.equal(part_of(llama, name, columns, rows, transposed=True), whole[16:24, 4:24].T)


def test_a_part_of_a_tensor_of_another_shape(llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for shard in ((Share(0, 24, 64), Share(0, 32, 32)), (Share(0, 24, 48),)):
        with pytest.raises(UnsupportedModelError, match=rf"{name} is \[48, 32\], config\.json says \["):
            part_of(llama, name, *shard)


def test_a_tensor_of_another_rank_must_be_present(llama: Path) -> None:
    with Checkpoint(llama, BUILD) as checkpoint:
        checkpoint.skip("lm_head.weight")
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.bias is missing"):
            checkpoint.skip("lm_head.bias")


def test_quantised_tensors_are_read_into_their_own_dtype_only(llama: Path) -> None:
    codes = torch.randint(-128, 127, (48, 32), dtype=torch.int8)
    rewrite(llama, lambda tensors: {**tensors, "codes": codes})
    with Checkpoint(llama, BUILD) as checkpoint:
        into = torch.zeros_like(codes)
        checkpoint.read("codes", into)
        assert torch.equal(into, codes)
        for dtype in (torch.float32, torch.uint8):
            with pytest.raises(UnsupportedModelError, match="codes has dtype I8"):
                checkpoint.read("codes", torch.empty(48, 32, dtype=dtype))


def test_drawn_routers_spread_the_tokens_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that n tokens choose E (1 - (1 - k / E)^n) of E experts, as with trained routers that choose k each."""
    sizes = {"hidden_size": 512, "num_experts": 64, "num_experts_per_tok": 4, "num_hidden_layers": 6, "head_dim": 64}
    reference = make_reference("qwen3-moe", **sizes, num_attention_heads=16, attention_bias=False)
    reference.config.architectures = ["Qwen3MoeForCausalLM"]
    reference.config.save_pretrained(tmp_path)
    chosen: list[torch.Tensor] = []
    route = experts.route

    def noted(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = route(*args, **options)
        chosen.append(ids)
        return ids, weights

    model = load(tmp_path, "dummy")
    monkeypatch.setattr("roseinfer.quant.experts.route", noted)
    logits(model, list(range(60)))
    for ids in chosen:
        assert len(ids.unique()) > 0.9 * 64 * (1 - (1 - 4 / 64) ** 60)


def test_more_experts_than_the_files_could_hold_are_refused(tmp_path: Path) -> None:
    save_reference(make_reference("mixtral"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 2**20}))
    with pytest.raises(UnsupportedModelError, match=r"describes .* weights, but the checkpoint's files hold"):
        load(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_that_are_not_finite_are_refused_by_name(llama: Path, value: float, quantization: str | None) -> None:
    whole = load_file(llama / "model.safetensors")
    spec = read_model_spec(llama)
    for name in (
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ):
        spoilt = whole[name].clone()
        spoilt.view(-1)[-1] = value
        save_file({**whole, name: spoilt}, llama / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UnsupportedModelError, match=rf"tensor {name} holds NaN, infinity"):
            load_checkpoint(llama, spec, quantization=quantization, dtype="auto")


def test_weights_beyond_the_dtype_that_is_computed_in(llama: Path) -> None:
    rewrite(llama, lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 1e6})
    load(llama, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight .* beyond float16"):
        load(llama, dtype="float16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    check = FiniteCheck()
    check.add("largest", torch.full((33, 65), largest, dtype=dtype))
    check.add("mixed", torch.tensor([largest, -largest, 0.0, torch.finfo(dtype).tiny], dtype=dtype))
    check.add("empty", torch.empty(0, 4, dtype=dtype))
    check.add("codes", torch.full((4,), 127, dtype=torch.int8))
    assert check.first_wrong() is None
    for place in range(67):
        tensor = torch.zeros(67, dtype=dtype)
        tensor[place] = torch.nan
        check = FiniteCheck()
        check.add("right", torch.zeros(3))
        check.add("wrong", tensor)
        assert check.first_wrong() == ("wrong", dtype)
