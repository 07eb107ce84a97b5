"""Drafters that know what will be said, and lie as often as they are told to."""

import random
from collections.abc import Sequence

from roseinfer.core.request import Request


class Oracle:
    """Each guess is right with probability `right`, as far as `outputs` (sequence -> its tokens) say; else any token.

    It counts what it has proposed, and follows unseen tokens as the scheduler asks it to.
    """

    def __init__(self, outputs: dict[str, list[int]], vocab_size: int, right: float, most: int = 5, seed: int = 0):
        self.proposed = 0
        self.unseen = 0  # proposals behind a token that nobody has seen yet
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._right = right
        self._most = most
        self._rng = random.Random(seed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        rng = self._rng
        assert most >= 1 and request.planned - len(request.tokens) in (0, 1)
        known = self._outputs.get(request.request_id, [])
        first = request.planned - request.prompt_len
        count = rng.randint(0, min(most, self._most))
        drafts = []
        for index in range(first, first + count):
            right = index < len(known) and rng.random() < self._right
            drafts.append(known[index] if right else rng.randrange(self._vocab_size))
        self.proposed += count
        self.unseen += count and request.planned > len(request.tokens)
        return drafts
