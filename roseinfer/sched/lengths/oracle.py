"""True lengths, from a trace: what a perfect predictor would be worth."""

from roseinfer.core.request import Request


class OracleLengths:
    """Trusts `predicted_len` to the token, up to the request's `max_tokens`; without one, it is these."""

    def total(self, request: Request) -> float:
        most = request.params.max_tokens
        return float(min(request.predicted_len or most, most))

    def left(self, request: Request, outputs: int) -> float:
        return max(1.0, self.total(request) - outputs)

    def finished(self, request: Request, outputs: int) -> None:
        """Nothing to learn."""
