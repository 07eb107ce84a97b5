"""True lengths, from a trace: what a perfect predictor would be worth."""

from roseinfer.core.request import Request


class OracleLengths:
    """Trusts `predicted_len` to the token; without one, the request's `max_tokens`."""

    def total(self, request: Request) -> float:
        return float(request.predicted_len or request.params.max_tokens)

    def left(self, request: Request, outputs: int) -> float:
        return max(1.0, self.total(request) - outputs)

    def finished(self, request: Request, outputs: int) -> None:
        """Nothing to learn."""
