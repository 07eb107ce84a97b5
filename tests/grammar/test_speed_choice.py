"""The faster of two options is found by trying both, and again when times change."""

from collections import Counter

from roseinfer.grammar.speed_choice import SpeedChoice


def work(choice: SpeedChoice, pieces: int, seconds: tuple[float, float], size: int = 64) -> Counter[int]:
    chosen: Counter[int] = Counter()
    for _ in range(pieces):
        option = choice.choose(size)
        chosen[option] += 1
        choice.record(option, size, seconds[option])
    return chosen


def test_the_faster_option_does_nearly_all_work():
    for best in (0, 1):
        chosen = work(SpeedChoice(), 10_000, (1.0, 3.0) if best == 0 else (3.0, 1.0))
        assert 5 < chosen[1 - best] < 20


def test_an_option_that_becomes_slower_is_left_at_once():
    choice = SpeedChoice()
    work(choice, 200, (1.0, 3.0))
    assert work(choice, 20, (9.0, 3.0))[0] <= 3


def test_an_option_that_becomes_faster_is_found_in_time():
    choice = SpeedChoice()
    work(choice, 200, (1.0, 3.0))
    work(choice, 2000, (1.0, 0.5))
    assert work(choice, 100, (1.0, 0.5))[1] == 100


def test_one_slow_piece_changes_nothing():
    choice = SpeedChoice()
    work(choice, 20, (1.0, 3.0))
    choice.record(0, 64, 100.0)
    assert choice.choose(64) == 0


def test_sizes_have_separate_times():
    choice = SpeedChoice()
    work(choice, 100, (1.0, 3.0), size=20)
    work(choice, 100, (3.0, 1.0), size=200)
    assert (choice.choose(17), choice.choose(255)) == (0, 1)
