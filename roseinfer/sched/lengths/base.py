"""How long an output will be: the protocol of the estimates."""

from typing import Protocol

from roseinfer.core.request import Request

MIN_LEFT = 8.0


class LengthEstimator(Protocol):
    def total(self, request: Request) -> float:
        """Output tokens expected of a request that has none."""
        ...

    def left(self, request: Request, outputs: int) -> float:
        """Output tokens expected beyond the first `outputs` (>= 1) of a request that goes on."""
        ...

    def finished(self, request: Request, outputs: int) -> None:
        """Learn from a request that came to its own end."""
        ...
