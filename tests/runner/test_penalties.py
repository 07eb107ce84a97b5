import pytest
import torch

from roseinfer.core.sampling import SamplingParams
from roseinfer.runner.penalties import Penalties
from tests.runner.reference import edited


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def test_state_is_kept_for_the_seats_that_need_it_only():
    penalties = Penalties(1000, torch.device("cpu"))
    assert penalties._counts.numel() == 0
    for seat in (200, 7, 31):
        penalties.admit(seat, SamplingParams(presence_penalty=1.0), ids())
    assert len(penalties._counts) == 4  # grows by doubling, not to the number of seats
    penalties.release(7)
    penalties.admit(90, SamplingParams(presence_penalty=1.0), ids())
    penalties.admit(91, SamplingParams(presence_penalty=1.0), ids())
    assert len(penalties._counts) == 4


def test_growing_keeps_counts_and_seats_stay_apart():
    penalties = Penalties(5, torch.device("cpu"))
    params = [
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.3),
        SamplingParams(frequency_penalty=0.7),
        SamplingParams(repetition_penalty=0.5),
    ]
    prompts, outputs = ([0, 1], [2], [4, 4]), ([1, 1, 3], [], [0])
    for seat, p in enumerate(params):
        penalties.admit(seat, p, ids(*outputs[seat]))
    rows = torch.tensor(penalties.rows([2, 0, 1]))
    penalties.count(rows, torch.tensor([3, 2, 2]))
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    after = {seat: [*outputs[seat], chosen] for seat, chosen in ((2, 3), (0, 2), (1, 2))}
    known = [(prompts[seat] + after[seat] + [prompts[seat][0]] * 5)[:5] for seat in (2, 0, 1)]
    tokens = torch.tensor(known)
    result = penalties.apply(logits.gather(1, tokens), tokens, rows)
    for i, seat in enumerate((2, 0, 1)):
        expected = edited(logits[i].tolist(), params[seat], prompts[seat], after[seat])
        assert result[i].tolist() == pytest.approx([expected[token] for token in known[i]], abs=1e-6)
