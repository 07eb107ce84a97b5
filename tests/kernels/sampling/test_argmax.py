import pytest
import torch

from roseinfer.kernels.sampling.argmax import NOT_FINITE, NOTHING_LEFT, greedy, greedy_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEATS, LENGTH = 7, 30


def run(function, logits, index_dtype=torch.int64, **options):
    """Return what the kernel writes to `out` and to the pool."""
    rows, device = len(logits), logits.device
    seats = torch.tensor([5, 0, 3, 6, 1, 2, 4][:rows], dtype=index_dtype, device=device)
    ends = torch.arange(3, 3 + rows, dtype=index_dtype, device=device)
    pool = torch.full((SEATS, LENGTH), -7, dtype=torch.int32, device=device)
    out = torch.full((rows,), -9, dtype=index_dtype, device=device)
    function(logits, seats, ends, pool, out, **options)
    changed = (pool != -7).nonzero()
    assert {tuple(c) for c in changed.tolist()} == set(zip(seats.tolist(), ends.tolist(), strict=True))
    return out, pool[seats.long(), ends.long()]


def agree(logits, **options):
    ours, expected = run(greedy, logits, **options), run(greedy_reference, logits)
    assert ours[0].tolist() == expected[0].tolist() and ours[1].tolist() == expected[1].tolist()
    return ours[0].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 1000, 8192, 8193, 50257])
def test_greedy(vocab_size, dtype, device):
    wide = torch.full((4, vocab_size + 3), torch.nan, dtype=dtype, device=device)
    wide[:, :vocab_size] = torch.randn(4, vocab_size, device=device)
    agree(wide[:, :vocab_size])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_ties_go_to_the_lowest_id(index_dtype, device):
    logits = torch.randn(4, 3000, device=device).clamp_max_(0.5)
    logits[1] = -3.0
    logits[2, 2999] = logits[2, 1024] = logits[2, 1023] = 9.0
    logits[3] = torch.tensor([-0.0, 0.0, -0.0], device=device).repeat(1000)
    tokens = agree(logits, chunk=1024, index_dtype=index_dtype)
    assert tokens[1:] == [0, 1023, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_an_answer(dtype, device):
    inf = torch.inf
    logits = torch.randn(7, 2100, dtype=dtype, device=device)
    logits[0, 2050] = torch.nan
    logits[1, 7] = inf
    logits[2] = -inf
    logits[3] = -inf
    logits[3, 2099] = -5
    logits[4] = -inf
    logits[4, 0] = torch.nan
    logits[5, :] = torch.finfo(dtype).min
    tokens = agree(logits, chunk=1024)
    assert tokens[:6] == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT, 2099, NOT_FINITE, 0]


def test_no_rows(device):
    out = torch.empty(0, dtype=torch.int64, device=device)
    greedy(torch.empty(0, 10, device=device), out, out, torch.zeros(1, 1, dtype=torch.int32, device=device), out)
