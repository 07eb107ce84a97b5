import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.text.stop import StopFeed, StopMatcher
from tests.helpers.cases import examples

SMALL = st.text(alphabet="ab", min_size=1, max_size=5)
STOPS = st.lists(SMALL, max_size=4).map(tuple)
PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=12)


def naive(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Return the shortest beginning of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> list[StopFeed]:
    return [*(matcher.feed(piece) for piece in pieces), matcher.feed("", final=True)]


@examples(1500)
@given(stops=STOPS, pieces=PIECES, include=st.booleans())
def test_equals_the_naive_reference_however_the_text_is_cut(stops, pieces, include):
    feeds = feed_all(StopMatcher(stops, include), pieces)
    assert ("".join(feed.text for feed in feeds), feeds[-1].stop) == naive("".join(pieces), stops, include)


@examples(1500)
@given(stops=STOPS, pieces=PIECES)
def test_nothing_leaks_and_only_necessary_text_is_withheld(stops, pieces):
    """Compare, after each piece, sent text plus the longest possible beginning of a stop string with all
    text so far.
    """
    matcher, text, sent = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        feed = matcher.feed(piece)
        sent += feed.text
        if feed.stop is not None:
            break
        held = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)
        assert sent == text[: len(text) - held]


@examples(500)
@given(stops=STOPS, pieces=PIECES, min_tokens=st.integers(0, 6))
def test_text_of_the_first_tokens_is_exempt(stops, pieces, min_tokens):
    feeds = feed_all(StopMatcher(stops, min_tokens=min_tokens), pieces)
    free, rest = "".join(pieces[:min_tokens]), "".join(pieces[min_tokens:])
    expected, stop = naive(rest, stops, False)
    assert ("".join(feed.text for feed in feeds), feeds[-1].stop) == (free + expected, stop)


def test_across_borders():
    matcher = StopMatcher(("\n\nUser:",))
    assert [matcher.feed(piece) for piece in ("Hi\n", "\nUs", "er: more")] == [
        StopFeed("Hi", None),
        StopFeed("", None),
        StopFeed("", "\n\nUser:"),
    ]


def test_withheld_text_is_released_when_it_cannot_match():
    matcher = StopMatcher(("<end>",))
    assert [matcher.feed(piece).text for piece in ("a <en", "d", "e<")] == ["a ", "", "<ende"]
    assert matcher.feed("", final=True) == StopFeed("<", None)


def test_first_complete_stop_wins_and_the_longest_of_those():
    assert StopMatcher(("abcd", "bc")).feed("abcd") == StopFeed("a", "bc")
    assert StopMatcher(("c", "bc")).feed("abcd") == StopFeed("a", "bc")


def test_the_end_is_final():
    matcher = StopMatcher(("x",), include_stop=True)
    assert matcher.feed("axb") == StopFeed("ax", "x")
    assert matcher.feed("more") == matcher.feed("", final=True) == StopFeed("", "x")


def test_a_match_in_the_final_piece():
    assert StopMatcher(("ab",)).feed("xab", final=True) == StopFeed("x", "ab")


@pytest.mark.parametrize("stop", ["a" * 5000, "ab" * 2500, "a" * 2499 + "b" + "a" * 2500])
def test_long_repetitive_stop_strings_are_fast(stop):
    """Use strings for which comparing every beginning with every token would take hours."""
    matcher = StopMatcher((stop,))
    text = stop[:-1] * 20
    expected, found = naive_find(text, stop)
    got, last = "", None
    for char in text:
        feed = matcher.feed(char)
        got, last = got + feed.text, feed.stop
        if last:
            break
    got += matcher.feed("", final=True).text
    assert (got, last) == (expected, found)


def naive_find(text: str, stop: str) -> tuple[str, str | None]:
    at = text.find(stop)
    return (text, None) if at < 0 else (text[:at], stop)
