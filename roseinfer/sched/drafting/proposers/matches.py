"""Matches of the last tokens: their length, what follows them, and the chance that it follows again."""

from collections.abc import Sequence

from roseinfer.core.config.speculation import MAX_MATCH_TOKENS

# Chance that the token after a match is the next one, by the length of the match. About what Python files have, the
# mean of those that are continued and those that are edited. Pricing corrects it by what was kept.
_MATCH_CHANCES = (0.5, 0.5, 0.5, 0.55, 0.65, 0.68, 0.72, 0.75, 0.77, 0.8, 0.81, 0.83, 0.84, 0.86, 0.87, 0.88, 0.9)


def last_tokens(tokens: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the last tokens of `tokens` and `after`, as many as a match may have."""
    if not after:
        return list(tokens[-MAX_MATCH_TOKENS:])
    return [*tokens[-MAX_MATCH_TOKENS:], *after][-MAX_MATCH_TOKENS:]


def match_length(tokens: Sequence[int], place: int, suffix: list[int]) -> int:
    """Return how many tokens before `place` equal the end of `suffix`."""
    most = min(place, len(suffix))
    if list(tokens[place - most : place]) == suffix:
        return most
    length = 0
    while length < most and tokens[place - 1 - length] == suffix[-1 - length]:
        length += 1
    return length


def match_chance(length: int) -> float:
    """Return the chance that the token after a match of `length` tokens is the next one."""
    return _MATCH_CHANCES[min(length, MAX_MATCH_TOKENS)]


def following(tokens: Sequence[int], place: int, after: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens from `place` on. After the last known one, `after` and these tokens themselves follow,
    so that a repetition goes on.
    """
    found = list(tokens[place : place + count])
    if len(found) < count:
        known = [*after, *found]
        begin = len(known) - len(found)  # where `found` starts in what follows `tokens`
        position = place + len(found) - len(tokens)
        while len(known) - begin < count:
            known.append(known[position])
            position += 1
        found = known[begin:]
    return found
