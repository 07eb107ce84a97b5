"""Lookup of a rank's rows of the vocabulary."""

from dataclasses import replace

import pytest
import torch

from roseinfer.kernels.sampling.vocab_rows import vocab_rows, vocab_rows_reference
from roseinfer.layers.embedding import VocabEmbedding
from tests.helpers.weights import Imagined, Named, build_for


@pytest.mark.parametrize(("held", "width", "start"), [(7, 8, 0), (7, 8, 7), (5, 2050, 12)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_are_held_and_zeros(held, width, start, dtype, device):
    """Ids include those on both sides of the share's bounds."""
    table = torch.randn(held, width).to(dtype).to(device)
    ids = torch.tensor([start, start - 1, start + held, start + held - 1, 0, 99, start + 1], device=device)
    expected = vocab_rows_reference(ids, table, start)
    assert expected.any() and not expected[2].any()
    assert torch.equal(vocab_rows(ids, table, start), expected)


def test_no_ids(device):
    assert vocab_rows(torch.empty(0, dtype=torch.int64, device=device), torch.ones(3, 8, device=device), 0).shape == (
        0,
        8,
    )


def test_an_embedding_of_two_ranks_adds_up_to_the_whole_one(device, monkeypatch):
    monkeypatch.setattr("roseinfer.layers.embedding.has_triton", lambda _: True)
    table, ids, rows = torch.randn(9, 8), torch.arange(9, device=device), torch.zeros(9, 8, device=device)
    for rank in range(2):
        embedding = VocabEmbedding(9, 8)
        embedding.load(Named({"wte.weight": table}, replace(build_for(Imagined(rank, 2)), device=device)), "wte")
        rows += embedding(ids)
    assert torch.equal(rows.cpu(), table)
