"""Models with adapters on a GPU compute what a CPU does, launched or replayed, and load adapters beside steps."""

import pytest
import torch

from tests.adapters.driving import Driver, assert_close, build
from tests.adapters.test_equivalence import REQUESTS, Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BFLOAT16_BAR = 0.12


@pytest.fixture(scope="module", params=["llama3", "gpt2"])
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def driver_of(case: Case, *, adapters: bool = True, **model: object) -> Driver:
    return Driver(build(case.model, *(case.named if adapters else ()), model={"device": "cuda", **model}))


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_rows_equal_those_of_a_cpu(case: Case, eager: bool) -> None:
    expected = Driver(build(case.model, *case.named)).run(REQUESTS)
    for one, other in zip(driver_of(case, enforce_eager=eager).run(REQUESTS), expected, strict=True):
        assert_close(one, other)


def test_rows_in_bfloat16(case: Case) -> None:
    """Compare log probabilities of prompts: few rows and many, as chunks have few."""
    expected = Driver(build(case.model, *case.named)).run(REQUESTS, outputs=1)
    driver = driver_of(case, dtype="bfloat16")
    for chunk in (100, 3):
        for found, wanted in zip(driver.run(REQUESTS, outputs=1, chunk=chunk), expected, strict=True):
            for one, other in zip(found.prompt, wanted.prompt, strict=True):
                assert abs(one.logprob - other.logprob) < BFLOAT16_BAR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_an_adapter_keep_their_bits(case: Case, dtype: str) -> None:
    plain = driver_of(case, adapters=False, dtype=dtype).run([(tokens, None) for tokens, _ in REQUESTS])
    driver = driver_of(case, dtype=dtype)
    mixed = driver.run(REQUESTS)
    assert [mixed[1], mixed[5]] == [plain[1], plain[5]] and mixed[0] != plain[0]
    assert driver.run([(tokens, None) for tokens, _ in REQUESTS]) == plain


def test_a_slot_gets_another_adapter(case: Case) -> None:
    driver = driver_of(case)
    tokens = REQUESTS[0][0]
    (expected,) = driver.run([(tokens, "small")])
    driver.load(driver.slots["large"], driver.named["small"].digest)
    driver.slots["small again"] = driver.slots["large"]
    assert driver.run([(tokens, "small again")]) == [expected]
