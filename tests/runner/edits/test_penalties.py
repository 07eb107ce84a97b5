import gc

import pytest
import torch

from roseinfer.core.plan import Admission
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.edits.penalties import Penalties
from roseinfer.runner.rows import SampledRows
from tests.runner.reference import edited


class Bench:
    """Penalties and the token pool that they read."""

    def __init__(self, vocab_size: int, seats: int = 300) -> None:
        self.pool = torch.zeros((seats, 16), dtype=torch.int32)
        self.penalties = Penalties(self.pool, vocab_size)

    def admit(self, seat: int, params: SequenceParams, prompt: list[int], outputs: list[int] | None = None) -> None:
        known = [*prompt, *(outputs or [])]
        self.pool[seat, : len(known)] = torch.tensor(known, dtype=torch.int32)
        admission = Admission(f"r{seat}", seat, known, len(prompt), params, 0, (), ())
        self.penalties.admit(admission, self.pool[seat, : len(known)])


def rows_of(width: int) -> int:
    """Return the rows of all live tensors of this width."""
    gc.collect()
    tensors = (item for item in gc.get_objects() if isinstance(item, torch.Tensor))
    return sum(len(tensor) for tensor in tensors if tensor.ndim == 2 and tensor.shape[1] == width)


def test_state_is_kept_for_the_seats_that_need_it_only():
    vocab_size = 997  # no other tensor has this width
    bench = Bench(vocab_size)
    assert rows_of(vocab_size) == 0
    params = SequenceParams(presence_penalty=1.0)
    for seat in (200, 7, 31):
        bench.admit(seat, params, [1])
    assert rows_of(vocab_size) == 4  # grows by doubling, not to the number of seats
    bench.penalties.release(7)
    bench.admit(90, params, [1])
    bench.admit(91, params, [1])
    assert rows_of(vocab_size) == 4


def test_growing_keeps_counts_and_seats_stay_apart():
    bench = Bench(5)
    penalties = bench.penalties
    params = [
        SequenceParams(repetition_penalty=1.5, presence_penalty=0.3),
        SequenceParams(frequency_penalty=0.7),
        SequenceParams(repetition_penalty=0.5),
    ]
    prompts, outputs = ([0, 1], [2], [4, 4]), ([1, 1, 3], [], [0])
    for seat, p in enumerate(params):
        bench.admit(seat, p, prompts[seat], outputs[seat])

    def rows() -> SampledRows:
        """Return rows of seats 2, 0 and 1, with their known tokens."""
        ends = [len(prompts[seat]) + len(outputs[seat]) for seat in (2, 0, 1)]
        return SampledRows([2, 0, 1], ends, torch.tensor([2, 0, 1]), torch.tensor(ends), [8, 8, 8], 8)

    sampled = rows()
    penalties.sampled(torch.tensor([3, 2, 2]), sampled, [0, 1, 2])
    for seat, chosen, end in zip((2, 0, 1), (3, 2, 2), sampled.ends, strict=True):
        outputs[seat].append(chosen)
        bench.pool[seat, end] = chosen
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    changed = logits.clone()
    penalties.apply(changed, rows(), [0, 1, 2])
    for i, seat in enumerate((2, 0, 1)):
        expected = edited(logits[i].tolist(), params[seat], prompts[seat], outputs[seat])
        assert changed[i].tolist() == pytest.approx(expected, abs=1e-6)
