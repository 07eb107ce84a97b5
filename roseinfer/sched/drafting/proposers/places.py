"""Places of n-grams in a growing sequence of tokens, from which proposers read what followed."""

from array import array
from collections.abc import Sequence

# Places that a look-up examines. More would cost time, and the latest ones resemble the present text most.
MAX_PLACES_COUNT = 16


class NgramPlaces:
    """Places after each n-gram of a sequence: positions whose last `order` tokens before them are the n-gram.

    Only positions with a token are places, so that each is followed by something.
    """

    __slots__ = ("_earlier", "_latest", "_order")

    def __init__(self, order: int) -> None:
        self._order = order
        self._latest: dict[int, int] = {}  # by the n-gram's hash
        self._earlier = array("i")  # by place - order: the place before it with the same hash, -1 = none

    @property
    def end(self) -> int:
        """Return the end of the indexed places."""
        return len(self._earlier) + self._order

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Index the places up to `end`. Earlier tokens are the same as in the calls before."""
        order, latest, earlier = self._order, self._latest, self._earlier
        first = len(earlier) + order
        near = tokens[first - order : end - 1]
        for place, ngram in enumerate(zip(*(near[i:] for i in range(order)), strict=False), first):
            key = hash(ngram)
            earlier.append(latest.get(key, -1))
            latest[key] = place

    def find(self, tokens: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the latest places after the last `order` tokens of `suffix`, the latest one first."""
        order = self._order
        wanted = tuple(suffix[-order:])
        places: list[int] = []
        place = self._latest.get(hash(wanted), -1) if len(wanted) == order else -1
        for _ in range(MAX_PLACES_COUNT):
            if place < 0:
                break
            if tuple(tokens[place - order : place]) == wanted:  # not another n-gram of the same hash
                places.append(place)
            place = self._earlier[place - order]
        return places
