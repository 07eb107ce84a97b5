"""The default policy stays small enough to be read: whoever changes one of its files should know what the others do. A
limit that is reached asks for something simpler first, and for a higher limit only then.
"""

from pathlib import Path

from roseinfer.sched.policies import slack

# Of which 60 are what it tells routers, 210 what it tells those that wait or are turned away, and 100 for models whose
# steps read more experts the more rows they have.
MOST_LINES = 1900


def test_it_can_be_read_in_one_sitting() -> None:
    files = Path(slack.__file__).parent.glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES
