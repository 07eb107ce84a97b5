"""Rows with adapters compute what merged weights compute, whatever else is in their steps."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.driving import Driver, Output, assert_close, build
from tests.helpers.checkpoints import VOCAB, make_reference, save_reference
from tests.helpers.lora_folders import linear_shapes, merge, write_adapter

FAMILIES = ("llama3", "gpt2", "phi3", pytest.param("qwen3", marks=pytest.mark.exhaustive))
ADAPTERS = {
    "small": {"rank": 4},
    "middle": {"rank": 8, "alpha": 5.0, "rslora": True},
    "large": {
        "rank": 64,
        "alpha": 32.0,
        "ranks": {"1.self_attn.q_proj": 7, "attn.c_attn": 3},
        "alphas": {"o_proj": 11.0, "mlp.c_proj": 3.0},
    },
}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Case:
    """Model with three adapters and its merged copies."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = save_reference(make_reference(family), folder / "model")
        shapes = linear_shapes(self.model)
        self.merged = {}
        for seed, (name, options) in enumerate(ADAPTERS.items()):
            changes = write_adapter(folder / name, shapes, seed=seed, **options)
            self.merged[name] = merge(self.model, changes, folder / f"merged-{name}")
        self.named = [f"{name}={folder / name}" for name in ADAPTERS]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param.replace("/", "-")))


REQUESTS = [(prompt(9, 1), "small"), (prompt(17, 2), None), (prompt(1, 3), "large"), (prompt(12, 4), "middle")]
REQUESTS += [(prompt(8, 5), "small"), (prompt(5, 6), None)]


def test_a_mixed_batch_equals_each_alone_and_merged_weights(case):
    driver = Driver(build(case.model, *case.named))
    together = driver.run(REQUESTS)
    for (tokens, name), found in zip(REQUESTS, together, strict=True):
        assert_close(driver.run([(tokens, name)])[0], found)
        folder = case.model if name is None else case.merged[name]
        assert_close(Driver(build(folder)).run([(tokens, None)])[0], found)
    each = {found.prompt for found in driver.run([(prompt(9, 1), name) for name in driver.slots])}
    assert len(each) == 4, "each adapter changes the result"


def test_rows_without_an_adapter_keep_their_bits(case):
    plain = Driver(build(case.model)).run([(tokens, None) for tokens, _ in REQUESTS])
    driver = Driver(build(case.model, *case.named))
    mixed = driver.run(REQUESTS)
    assert [mixed[1], mixed[5]] == [plain[1], plain[5]]
    assert mixed[0] != plain[0]
    assert driver.run([(tokens, None) for tokens, _ in REQUESTS]) == plain


def test_chunks_equal_whole_prompts(case):
    driver = Driver(build(case.model, *case.named))
    for whole, chunked in zip(driver.run(REQUESTS), driver.run(REQUESTS, chunk=3), strict=True):
        assert_close(chunked, whole)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Case:
    return Case("llama3", tmp_path_factory.mktemp("llama"))


def test_changes_of_zero_keep_all_bits(llama, tmp_path):
    write_adapter(tmp_path, linear_shapes(llama.model))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    zeroed = {name: tensor * ("lora_A" in name) for name, tensor in tensors.items()}
    save_file(zeroed, tmp_path / "adapter_model.safetensors")
    driver = Driver(build(llama.model, f"zero={tmp_path}"))
    found = driver.run([(tokens, "zero") for tokens, _ in REQUESTS])
    assert found == driver.run([(tokens, None) for tokens, _ in REQUESTS])


def test_drafts_change_nothing(llama):
    plain = Driver(build(llama.model, *llama.named)).run(REQUESTS)
    driver = Driver(build(llama.model, *llama.named, speculation="ngram"))
    right = [output.tokens[1:5] for output in plain]
    wrong = [(*tokens[:2], (tokens[2] + 1) % VOCAB, 7) for tokens in right]
    for drafts in (right, wrong):
        for found, wanted in zip(driver.run(REQUESTS, drafts=drafts), plain, strict=True):
            assert_close(found, wanted)


def test_an_adapter_of_some_layers(llama, tmp_path):
    some = linear_shapes(llama.model, modules=r"1\.self_attn\.[qv]_proj|0\.mlp\.down_proj")
    assert len(some) == 3
    merged = merge(llama.model, write_adapter(tmp_path / "some", some), tmp_path / "merged")
    driver = Driver(build(llama.model, *llama.named, f"some={tmp_path / 'some'}"))
    requests = [*REQUESTS, (prompt(9, 8), "some")]
    assert_close(driver.run(requests)[-1], Driver(build(merged)).run([(prompt(9, 8), None)])[0])


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "fp8"}, {"dtype": "bfloat16"}], ids=str)
def test_rounded_models_plus_a_change_are_near_merged_weights(llama, options):
    """Both weights and sums are rounded; an adapter changes log probabilities by far more."""
    model = {"dtype": "float32", **options}
    driver = Driver(build(llama.model, *llama.named, model=model))
    exact, found = Driver(build(llama.model, *llama.named)), driver.run(REQUESTS, outputs=1)
    wanted = exact.run(REQUESTS, outputs=1)
    base = exact.run([(tokens, None) for tokens, _ in REQUESTS], outputs=1)
    errors = list(map(distance, found, wanted))
    changes = list(map(distance, wanted, base))
    assert max(errors) < 0.15 and sum(changes) > 4 * sum(errors)
    plain = Driver(build(llama.model, model=model)).run([(tokens, None) for tokens, _ in REQUESTS], outputs=1)
    assert [found[1], found[5]] == [plain[1], plain[5]]


def distance(one: Output, other: Output) -> float:
    """Return the mean difference of the prompts' log probabilities, or of the first output's in a prompt of one."""
    pairs = list(zip(one.prompt or one.logprobs, other.prompt or other.logprobs, strict=True))
    return sum(abs(mine.logprob - others.logprob) for mine, others in pairs) / len(pairs)
