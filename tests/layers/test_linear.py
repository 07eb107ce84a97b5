"""Linear layers, whole and split: the ranks' parts together compute the result of the whole layer."""

from dataclasses import replace

import pytest
import torch

from roseinfer.adapters.adapting import Adapting
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.layers.embedding import LMHead, VocabEmbedding
from roseinfer.layers.linear import Linear, Split, StackedOutput
from roseinfer.layers.norm import RMSNorm
from roseinfer.parallel.group import Product
from roseinfer.quant.base import AdapterRows, WeightSource
from tests.helpers.weights import Imagined, Named, build_for


def stored(*widths: int, ins: int = 8, transposed: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights and biases of the layers "0", "1", ... of these widths."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, width in enumerate(widths):
        weight = torch.randn(width, ins, generator=generator)
        tensors[f"{i}.weight"] = weight.T.contiguous() if transposed else weight
        tensors[f"{i}.bias"] = torch.randn(width, generator=generator)
    return tensors


def loaded(layer: Linear, source: WeightSource, *names: str, transposed: bool = False) -> Linear:
    layer.load(source, *names, transposed=transposed)
    return layer


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_matrices(transposed: bool) -> None:
    tensors = stored(3, 5, transposed=transposed)
    layer = loaded(Linear(8, 3, 5, split=Split.OUTPUTS, bias=True), Named(tensors), "0", "1", transposed=transposed)
    x = torch.randn(4, 8)
    weights = [tensors[f"{i}.weight"].T if transposed else tensors[f"{i}.weight"] for i in "01"]
    expected = torch.cat([x @ weights[i].T + tensors[f"{i}.bias"] for i in (0, 1)], dim=1)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stacked", [False, True])
def test_split_outputs(size: int, stacked: bool) -> None:
    """Each rank has columns of q, k and v side by side; four ranks share the two heads of k and v."""
    tensors = stored(16, 8, 8)
    names: tuple[str, ...] = ("0", "1", "2")
    if stacked:
        kinds = ("weight", "bias")
        tensors = {f"all.{kind}": torch.cat([tensors[f"{i}.{kind}"] for i in "012"]) for kind in kinds} | tensors
        names = ("all",)
    outs = (StackedOutput(16, 4), StackedOutput(8, 4, repeat=True), StackedOutput(8, 4, repeat=True))
    x = torch.randn(3, 8)
    parts = [x @ tensors[f"{i}.weight"].T + tensors[f"{i}.bias"] for i in "012"]
    for rank in range(size):
        layer = Linear(8, *outs, split=Split.OUTPUTS, bias=True)
        layer.load(Named(tensors, build_for(Imagined(rank, size))), *names)
        q, k, v = parts[0], parts[1], parts[2]
        held = rank * 2 // size if size > 2 else rank
        expected = torch.cat([q.chunk(size, 1)[rank], k.chunk(2, 1)[held], v.chunk(2, 1)[held]], dim=1)
        torch.testing.assert_close(layer(x), expected)


class InPieces(Imagined):
    """A group that computes a row's product by itself where it may."""

    def sum_products(self, product: Product, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(row, None) for row in x.split(1)]) + residual


@pytest.mark.parametrize("idle", [False, True])
def test_products_with_adapters_see_all_rows_of_a_step(idle: bool) -> None:
    """The adapter of a row is that of its place in the step."""
    adapting = Adapting((), torch.device("cpu"))
    if not idle:
        adapting.begin(AdapterRows([0, 1, -1], torch.tensor([0, 1, -1], dtype=torch.int32)))
    tensors = stored(6)
    layer = Linear(8, 6, split=Split.INPUTS)
    layer.load(Named(tensors, replace(build_for(InPieces(0, 2)), adapting=adapting)), "0")
    seen: list[int] = []

    def product(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(len(x))
        return x @ tensors["0.weight"][:, :4].T

    layer.matmul = product  # type: ignore[assignment]
    layer(torch.ones(3, 4), torch.zeros(3, 6))
    assert seen == ([1, 1, 1] if idle else [3])


@pytest.mark.parametrize("size", [1, 2])
def test_outputs_whose_units_alternate(size: int) -> None:
    """A matrix has a unit of the first output, one of the second, and so on; another matrix is between them."""
    tensors = stored(16, 6)
    first, second = (StackedOutput(8, 2, stripe=(start, 4)) for start in (0, 2))
    x = torch.randn(3, 8)
    mixed, other = (x @ tensors[f"{i}.weight"].T + tensors[f"{i}.bias"] for i in (0, 1))
    pairs = mixed.view(3, 4, 2, 2)
    for rank in range(size):
        layer = Linear(8, first, 6, second, split=Split.OUTPUTS, bias=True)
        layer.load(Named(tensors, build_for(Imagined(rank, size))), "0", "1", "0")
        parts = (pairs[:, :, 0].flatten(1), other, pairs[:, :, 1].flatten(1))
        expected = torch.cat([part.chunk(size, 1)[rank] for part in parts], dim=1)
        torch.testing.assert_close(layer(x), expected)


def test_two_matrices_of_which_one_is_stacked() -> None:
    tensors = stored(7, 5)
    layer = loaded(Linear(8, 3, 4, 5, split=Split.OUTPUTS, bias=True), Named(tensors), "0", "0", "1")
    x = torch.randn(3, 8)
    expected = torch.cat([x @ tensors[f"{i}.weight"].T + tensors[f"{i}.bias"] for i in (0, 1)], dim=1)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("adding", [False, True])
def test_split_inputs_add_up_with_one_bias_and_one_residual(adding: bool) -> None:
    tensors = stored(6)
    x, residual = torch.randn(3, 8), torch.randn(3, 6)
    whole = x @ tensors["0.weight"].T + tensors["0.bias"] + residual
    total = torch.zeros(3, 6)
    for rank, part in enumerate(x.chunk(2, 1)):
        source = Named(tensors, build_for(Imagined(rank, 2, adding)))
        layer = loaded(Linear(8, 6, split=Split.INPUTS, bias=True), source, "0")
        assert source.asked == {"0.weight", "0.bias"}, "a tensor nobody asks for looks superfluous"
        total += layer(part.contiguous(), residual.clone())
    torch.testing.assert_close(total, whole)


def test_sizes_that_ranks_cannot_share_are_rejected() -> None:
    source = Named(stored(6), build_for(Imagined(0, 4)))
    with pytest.raises(ConfigError, match="6 columns in units of 1 cannot be split among 4"):
        Linear(8, 6, split=Split.OUTPUTS).load(source, "0")
    with pytest.raises(ConfigError, match="8 columns in units of 4"):
        Linear(8, 6, split=Split.INPUTS, unit=4).load(source, "0")
    with pytest.raises(UnsupportedModelError, match=r"gone\.bias is missing"):
        layer = Linear(8, 6, split=Split.INPUTS, bias=True)
        layer.load(Named(stored(6), build_for(Imagined(1, 2))), "gone")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_split_vocabulary(size: int, tied: bool) -> None:
    """Nine tokens: three of four ranks hold three each, and the last none."""
    vocab, width = 9, 8
    tensors = {
        "wte.weight": torch.randn(vocab, width),
        "lm_head.weight": torch.randn(vocab, width),
        "norm.weight": torch.rand(width),
    }
    head_name = "wte.weight" if tied else "lm_head.weight"
    ids, hidden = torch.arange(vocab), torch.randn(2, width)
    rows, logits = torch.zeros(vocab, width), []
    for rank in range(size):
        source = Named(tensors, build_for(Imagined(rank, size)))
        embedding, norm = VocabEmbedding(vocab, width), RMSNorm(width, 1e-5)
        embedding.load(source, "wte")
        head = LMHead(norm, width, vocab)
        head.load(source, "norm", None if tied else "lm_head", embedding)
        assert head.padded_vocab >= vocab
        rows += embedding(ids)
        logits.append(head(hidden))
    torch.testing.assert_close(rows, tensors["wte.weight"])
    expected = torch.nn.functional.rms_norm(hidden, (width,), tensors["norm.weight"], 1e-5) @ tensors[head_name].T
    torch.testing.assert_close(torch.cat(logits, 1)[:, :vocab], expected)
