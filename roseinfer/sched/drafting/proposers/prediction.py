"""Prediction proposer: the output that a client predicts, such as a file before an edit."""

from collections.abc import Sequence
from typing import NamedTuple

from roseinfer.core.config.speculation import MAX_DRAFTS
from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.sched.drafting.proposers.index_budget import IndexBudget
from roseinfer.sched.drafting.proposers.places import NgramPlaces

NAME = "prediction"
# After a difference, the text is looked for so far after its place in the prediction, and so far before it.
_NEAR_TOKENS = 512
_BACK_TOKENS = 32
_FAR_MATCH_TOKENS = 4  # that find a text anywhere in the prediction
_NEAR_MATCHES = (4, 2)
# New tokens that are followed one by one: as many as a step adds. After a pause of drafting there are more, and each
# that is not as predicted costs a search.
_MAX_FOLLOWED_TOKENS = MAX_DRAFTS + 1
# Chance of a predicted token, if at least `_SURE_RUN_TOKENS` before it were as predicted, and if not. About what edits
# of Python files have.
_SURE_RUN_TOKENS = 3
_CHANCES = (0.92, 0.45)


class _Place(NamedTuple):
    """Place in the prediction. `next`: its token that should come next. `run`: how many tokens before were as
    predicted; -1 = the text is elsewhere, after this place the last time.
    """

    next: int = 0
    run: int = _SURE_RUN_TOKENS  # the client says that the output begins like this


class _Follower:
    """Follower of one output through its prediction."""

    def __init__(self, prediction: tuple[int, ...], budget: IndexBudget) -> None:
        self._prediction = prediction
        self._budget = budget
        self._places = NgramPlaces(_FAR_MATCH_TOKENS)
        self._text: list[int] = []
        self._place = _Place()

    def follow(self, outputs: Sequence[int]) -> None:
        """Go on along the output. `outputs`: its new tokens. The first ones of many are assumed to be as predicted."""
        if self._place.run < 0:
            self._index_more()
        skipped = max(0, len(outputs) - _MAX_FOLLOWED_TOKENS)
        if skipped and self._place.run >= 0:
            self._place = _Place(self._place.next + skipped, 0)
        self._text += outputs[:skipped]
        for token in outputs[skipped:]:
            self._text.append(token)
            self._place = self._after(self._place, self._text)

    def _index_more(self) -> None:
        """Index more of the prediction, as the text is not near its last place."""
        end = self._places.end
        if end < len(self._prediction):
            self._places.extend(self._prediction, end + self._budget.take(len(self._prediction) - end))

    @property
    def num_seen(self) -> int:
        return len(self._text)

    def guess(self, limit: int, after: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Return predicted tokens that follow the output and `after`, and the length of the match before them."""
        place, text = self._place, self._text[-_FAR_MATCH_TOKENS:]
        for token in after:
            text.append(token)
            place = self._after(place, text)
        if place.run < 0:
            return (), 0
        return self._prediction[place.next : place.next + limit], place.run

    def _after(self, place: _Place, text: list[int]) -> _Place:
        """Return the place after the last token of the text, `place` being that before it."""
        prediction, at = self._prediction, place.next
        if place.run >= 0 and at < len(prediction) and prediction[at] == text[-1]:
            return _Place(at + 1, place.run + 1)
        for length in _NEAR_MATCHES:
            found = self._near(at, tuple(text[-length:]), length)
            if found:
                return _Place(found, length)
        far = self._far(text)
        if far:
            return _Place(far, _FAR_MATCH_TOKENS)
        # One token may have replaced another; after two differences the text is lost.
        return _Place(at + 1, 0) if place.run > 0 else _Place(at, -1)

    def _near(self, at: int, wanted: tuple[int, ...], length: int) -> int:
        """Return the first place near `at` that follows the wanted tokens; 0 = none."""
        prediction, last = self._prediction, wanted[-1]
        start, end = max(length - 1, at - _BACK_TOKENS), min(at + _NEAR_TOKENS, len(prediction) - 1)
        while start < end:
            try:
                start = prediction.index(last, start, end) + 1
            except ValueError:
                break
            if prediction[start - length : start] == wanted:
                return start
        return 0

    def _far(self, text: list[int]) -> int:
        """Return the last indexed place that follows the last tokens of the text; 0 = none."""
        return next(iter(self._places.find(self._prediction, text)), 0)


class PredictionProposer:
    """Proposer of what the client predicts as output. After a difference it finds the place where the text goes on."""

    def __init__(self, budget: IndexBudget) -> None:
        self._budget = budget
        self._followers: dict[str, _Follower] = {}

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        if not request.prediction:
            return None
        follower = self._followers.get(request.request_id)
        if follower is None:
            follower = self._followers[request.request_id] = _Follower(request.prediction, self._budget)
        follower.follow(request.tokens[request.prompt_len + follower.num_seen :])
        guesses, length = follower.guess(limit, after)
        if not guesses:
            return None
        chances = tuple(_CHANCES[length + i < _SURE_RUN_TOKENS] for i in range(len(guesses)))
        return Proposal(NAME, guesses, chances)

    def ended(self, request: Request) -> None:
        self._followers.pop(request.request_id, None)
