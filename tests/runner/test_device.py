import torch

from roseinfer.runner.device import MAX_LISTED_COUNT, write_ranges
from roseinfer.runner.timing import StepTimers


def test_ranges_are_written_to_their_places_only():
    target = torch.full((4, 6), -1, dtype=torch.int32)
    write_ranges(target, [2, 0, 3, 1], [1, 0, 5, 2], [[7, 8, 9], (1, 2, 3, 4, 5, 6), [], [4]])
    assert target.tolist() == [
        [1, 2, 3, 4, 5, 6],
        [-1, -1, 4, -1, -1, -1],
        [-1, 7, 8, 9, -1, -1],
        [-1] * 6,
    ]


def test_many_values_are_written_as_few_are():
    target, expected = (torch.full((3, 2 * MAX_LISTED_COUNT), -1, dtype=torch.int32) for _ in range(2))
    ranges = {2: (7, MAX_LISTED_COUNT), 0: (3, 5)}
    for row, (column, count) in ranges.items():
        expected[row, column : column + count] = torch.arange(count, dtype=torch.int32)
    write_ranges(
        target, list(ranges), [column for column, _ in ranges.values()], [range(n) for _, n in ranges.values()]
    )
    assert torch.equal(target, expected)


def test_nothing_to_write():
    target = torch.zeros((2, 2), dtype=torch.int32)
    write_ranges(target, [], [], [])
    write_ranges(target, [1], [0], [()])
    assert not target.any()


def test_steps_run_on_the_timed_stream_whatever_the_callers_stream(monkeypatch):
    made, mine = torch.device("cuda"), object()
    current = [mine]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: object())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    timers = StepTimers(made)
    current.append(object())  # the stream of a caller of generate, set with torch.cuda.stream
    timers.new()
    assert current[-1] is mine
