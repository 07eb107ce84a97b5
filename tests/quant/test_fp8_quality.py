"""Cost of rounding a trained model to FP8: the embedded one, on held-out text."""

import pytest
import torch
import torch.nn.functional as F

from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.quant.base import Epilogue
from roseinfer.quant.cpu_matmul import PlainMatmul
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_weight import Fp8Weight
from tests.helpers.cases import cases
from tests.helpers.held_out import cosine, held_out_logits, held_out_tokens, loss_of


class RoundedInputs(PlainMatmul):
    """Product that rounds its inputs to FP8, too, with a scale for each row, or for each 128 of its columns."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, epilogue: Epilogue) -> None:
        super().__init__(weight.widen(torch.float32), bias, epilogue)
        self._group = SCALE_BLOCK if weight.is_block else weight.codes.shape[1]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().__call__(Fp8Weight.of(x.reshape(-1, self._group)).widen(x.dtype).view(x.shape), residual, out)


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    return held_out_logits()


def test_the_model_predicts_the_text(exact: torch.Tensor) -> None:
    tokens = held_out_tokens()
    assert sum(map(len, tokens)) > 1000
    assert 1.0 < loss_of(exact, tokens) < 4.0, "of 8.3 nats that a uniform guess costs"


@cases("scheme", [Fp8Scheme("channel")], exhaustive=[Fp8Scheme("block")])
def test_weights_alone(scheme: Fp8Scheme, exact: torch.Tensor) -> None:
    found = held_out_logits(weight_format=Fp8Format(scheme, rounds=True, widens=True))
    assert 0.998 < cosine(found, exact) < 1.0
    assert F.cosine_similarity(found, exact).min() > 0.995, "of each token's logits, too"
    assert loss_of(found, held_out_tokens()) == pytest.approx(loss_of(exact, held_out_tokens()), rel=0.01)


@cases("scheme", [Fp8Scheme("block")], exhaustive=[Fp8Scheme("channel")])
def test_weights_and_activations(scheme: Fp8Scheme, exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Format, "_product", lambda self, *given: RoundedInputs(*given))
    found = held_out_logits(weight_format=Fp8Format(scheme, rounds=True, widens=False))
    assert 0.995 < cosine(found, exact) < 1.0
    assert loss_of(found, held_out_tokens()) == pytest.approx(loss_of(exact, held_out_tokens()), rel=0.01)
