"""`--quantization int4`: layers that are rounded while they load, on the CPU, and the choice of the format."""

import logging
from dataclasses import replace

import pytest
import torch

from roseinfer.core.errors import ConfigError
from roseinfer.parallel.group import Share
from roseinfer.quant.base import NO_EPILOGUE, WeightPiece
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.int4_format import Int4Format
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.int8_format import Int8Format
from roseinfer.quant.int8_product import unsupported_reason
from roseinfer.quant.plain import PlainFormat
from roseinfer.quant.select import choose_format
from tests.helpers.weights import BUILD, Named

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def piece(name, outs, columns, **options):
    return WeightPiece(name, Share(0, outs, outs), Share(0, columns, columns), **options)


def test_rounds_stacked_and_transposed_pieces():
    tensors = {"a.weight": torch.randn(8, 256), "a.bias": torch.randn(8), "b.weight": torch.randn(256, 4)}
    tensors["b.bias"] = torch.randn(4)
    pieces = [piece("a", 8, 256, bias=True), piece("b", 4, 256, bias=True, transposed=True)]
    x = torch.randn(3, 256)
    wide = torch.cat((tensors["a.weight"], tensors["b.weight"].T))
    rounded = Int4Weight.of(wide, 128).widen(torch.float32)
    found = Int4Format(None, None, rounds=True).load(Named(dict(tensors), BUILD), pieces, NO_EPILOGUE)(x)
    torch.testing.assert_close(found, x @ rounded.T + torch.cat((tensors["a.bias"], tensors["b.bias"])))


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32), (100, None)])
def test_the_group_divides_the_columns(columns, group):
    made = []

    def product(weight, bias, epilogue, inputs):
        made.append(weight.group)

    source = Named({"a.weight": torch.randn(8, columns)}, BUILD)
    Int4Format(None, product, rounds=True).load(source, [piece("a", 8, columns)], NO_EPILOGUE)
    assert made == ([] if group is None else [group])


def test_drawn_weights_follow_the_scheme():
    scheme = Int4Scheme("awq", Int4Groups(32, symmetric=False), ignored=("b",))
    weight = torch.randn(8, 256)
    loaded = Int4Format(scheme, None, rounds=True)
    for name, expected in (("a", Int4Weight.of(weight, 32).widen(torch.float32)), ("b", weight)):
        matmul = loaded.load(Named({f"{name}.weight": weight}, BUILD), [piece(name, 8, 256)], NO_EPILOGUE)
        torch.testing.assert_close(matmul(torch.eye(256)), expected.T)


def test_choice(monkeypatch, caplog):
    monkeypatch.setattr("roseinfer.quant.select.has_triton", lambda device: device.type == "cuda")
    scheme = Int4Scheme("awq", Int4Groups(64, symmetric=False))
    with caplog.at_level(logging.WARNING, "roseinfer.quant.select"):
        assert choose_format("int4", None, GPU, torch.bfloat16, dummy=True).stored_as == "int4 in groups of 128"
        assert not caplog.messages
        assert choose_format("int4", None, CPU, torch.bfloat16).stored_as == "int4 in groups of 128, widened"
        assert "AWQ, GPTQ" in caplog.text
    for asked in (None, "int4"):
        assert choose_format(asked, scheme, GPU, torch.bfloat16).stored_as == "int4 in groups of 64"
        assert choose_format(asked, scheme, GPU, torch.float32).stored_as == "int4 in groups of 64, widened"
    assert choose_format("floats", scheme, GPU, torch.bfloat16).stored_as == "int4 in groups of 64, widened"
    if unsupported_reason() is None:
        assert isinstance(choose_format(None, scheme, CPU, torch.float32), Int8Format)
    monkeypatch.setattr("roseinfer.quant.select.unsupported_reason", lambda: "it is another CPU")
    assert choose_format(None, scheme, CPU, torch.float32).stored_as == "int4 in groups of 64, widened"
    gguf = replace(scheme, layout="gguf")
    assert isinstance(choose_format(None, gguf, CPU, torch.float32), PlainFormat)
    assert isinstance(choose_format(None, gguf, GPU, torch.float16), Int4Format)
    with pytest.raises(ConfigError, match="int4 is for weights that are floats"):
        choose_format("int4", Fp8Scheme("channel"), GPU, torch.bfloat16)
