"""Rows with adapters compute what merged weights compute, whatever else is in their steps."""

from pathlib import Path

import pytest
import torch

from tests.adapters.driving import Driver, assert_close, build
from tests.helpers.checkpoints import VOCAB, make_reference, save_reference
from tests.helpers.lora_folders import linear_shapes, merge, write_adapter

FAMILIES = ("llama3", "gpt2", "phi3", "qwen3")
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
