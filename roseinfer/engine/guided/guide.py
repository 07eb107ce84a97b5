"""Guides, which decide token by token how an output may continue: the interfaces."""

import math
from collections.abc import Sequence
from typing import Protocol

from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import GuideStats


class MaskSource(Protocol):
    """Grammar state that computes a mask; see `grammar.library.Matcher`. `halted`: it is complete or has failed.
    `accepting`: the output may end here.
    """

    @property
    def accepting(self) -> bool: ...

    def allows(self, token_ids: Sequence[int]) -> bool: ...

    @property
    def halted(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def failure(self) -> Exception: ...

    def fill(self, words: memoryview) -> None: ...


class Guide(Protocol):
    """Constraint of one sequence. `ignores_output`: no mask depends on the output. `edits_mask`: it changes masks."""

    @property
    def ignores_output(self) -> bool: ...

    @property
    def edits_mask(self) -> bool: ...

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take the tokens since the last call. Return True if the output is complete: the sequence ends after them."""
        ...

    def fork(self) -> "Guide":
        """Return an independent guide in the same state, in microseconds."""
        ...

    def forced(self, limit: int) -> Sequence[int]:
        """Return up to `limit` next tokens, each of which is the only one that its mask allows. There may be more."""
        ...

    def mask(self) -> "MaskSource | memoryview | None":
        """Return the grammar or the row of `TokenMasks` that limits the next token; None if every token is allowed."""
        ...

    def finish_mask(self, words: memoryview) -> bool:
        """Change the mask that the grammar wrote to `words`, if necessary. Return True if the output is complete.

        Called if `edits_mask`, or if the grammar has halted.
        """
        ...


class PendingGuide(Protocol):
    """Guides of one request's sequences, before they are made. `ready`: compilation is done."""

    @property
    def ready(self) -> bool: ...

    def make(self) -> Guide:
        """Return a guide at the start of an output. Raise `InvalidRequestError` for a constraint that does not
        compile.
        """
        ...


class GuideFactory(Protocol):
    """Maker of guides from the constraints of requests."""

    def prepare(self, spec: GuideSpec) -> PendingGuide:
        """Start compiling. Raise `InvalidRequestError` for a `spec` that cannot be enforced."""
        ...

    def fill(
        self, sources: Sequence[MaskSource], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        """Write the masks of the first sources to their rows of `words`. Return how many, at least 1.

        After `until_s`, on the clock of `perf_counter`, few masks are started. `threads` False: use only this thread.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until another pending guide is ready since the last call."""
        ...

    def stats(self) -> GuideStats:
        """Return counts of compilation only."""
        ...

    def close(self) -> None:
        """Start no more compilations."""
        ...
