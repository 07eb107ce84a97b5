"""The default policy stays small enough to be read."""

from pathlib import Path

from roseinfer.sched.policies import slack

MOST_LINES = 1000


def test_it_can_be_read_in_one_sitting() -> None:
    files = Path(slack.__file__).parent.glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES
