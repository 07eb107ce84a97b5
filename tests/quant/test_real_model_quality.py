"""Cost of eight bits in a real model: perplexity of the Python documentation, as in benchmarks/perplexity.py.

Four windows give figures close to those of the whole benchmark (docs/how-to/eight-bits.md).
"""

import pytest

from benchmarks.perplexity import FLOATS, PerplexityConfig, measure
from roseinfer.quant import int8_product
from tests.helpers.real_model import REAL_MODEL, needs_real_model

pytestmark = [needs_real_model, pytest.mark.long, pytest.mark.exhaustive]

CONFIG = PerplexityConfig(model=str(REAL_MODEL), windows=4, window=256, device="cpu")
# Share by which the perplexity may grow. K and V have three bits of mantissa at any scale.
MOST = {"int8": 0.01, "fp8": 0.01, "kv-fp8": 0.015}


@pytest.fixture(scope="module")
def floats() -> float:
    return measure(CONFIG, FLOATS).perplexity


def test_the_model_predicts_the_text(floats: float) -> None:
    assert 10 < floats < 20


@pytest.mark.parametrize("way", MOST)
def test_eight_bits(way: str, floats: float) -> None:
    if way == "int8" and int8_product.unsupported_reason() is not None:
        pytest.skip(f"int8 is not supported: {int8_product.unsupported_reason()}")
    found = measure(CONFIG, way).perplexity
    assert found != floats, "it was rounded"
    assert found < floats * (1 + MOST[way])
