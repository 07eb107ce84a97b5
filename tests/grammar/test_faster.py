"""The faster of two ways is found by doing both, and found anew when that changes."""

from collections import Counter

from roseinfer.grammar.faster import Faster


def work(faster: Faster, pieces: int, seconds: tuple[float, float], size: int = 64) -> Counter[int]:
    chosen: Counter[int] = Counter()
    for _ in range(pieces):
        way = faster.choose(size)
        chosen[way] += 1
        faster.note(way, size, seconds[way])
    return chosen


def test_the_faster_way_does_nearly_all_the_work():
    for best in (0, 1):
        chosen = work(Faster(), 10_000, (1.0, 3.0) if best == 0 else (3.0, 1.0))
        assert 5 < chosen[1 - best] < 20


def test_a_way_that_becomes_slower_is_left_at_once():
    faster = Faster()
    work(faster, 200, (1.0, 3.0))
    assert work(faster, 20, (9.0, 3.0))[0] <= 3


def test_a_way_that_becomes_faster_is_found_in_time():
    faster = Faster()
    work(faster, 200, (1.0, 3.0))
    work(faster, 2000, (1.0, 0.5))
    assert work(faster, 100, (1.0, 0.5))[1] == 100


def test_one_slow_piece_changes_nothing():
    faster = Faster()
    work(faster, 20, (1.0, 3.0))
    faster.note(0, 64, 100.0)
    assert faster.choose(64) == 0


def test_sizes_are_apart():
    faster = Faster()
    work(faster, 100, (1.0, 3.0), size=20)
    work(faster, 100, (3.0, 1.0), size=200)
    assert (faster.choose(17), faster.choose(255)) == (0, 1)
