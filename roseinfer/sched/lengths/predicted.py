"""A prediction that comes with the request; requests without one are estimated from those that have ended."""

from roseinfer.core.request import Request
from roseinfer.sched.lengths.base import MIN_LEFT, LengthEstimator


class PredictedLengths:
    """What is left: prediction - outputs, at least 15% of the outputs and 8 tokens; never beyond `max_tokens`.

    A request that nothing but `max_tokens` can end needs no prediction.
    """

    def __init__(self, otherwise: LengthEstimator) -> None:
        self._otherwise = otherwise

    def total(self, request: Request) -> float:
        most = max(1, request.params.max_tokens)
        if runs_to_its_limit(request):
            return float(most)
        if request.predicted_len is None:
            return self._otherwise.total(request)
        return float(max(1, min(request.predicted_len, most)))

    def left(self, request: Request, outputs: int) -> float:
        most = max(1, request.params.max_tokens - outputs)
        if runs_to_its_limit(request):
            return float(most)
        if request.predicted_len is None:
            return self._otherwise.left(request, outputs)
        return float(min(max(request.predicted_len - outputs, 0.15 * outputs, MIN_LEFT), most))

    def finished(self, request: Request, outputs: int) -> None:
        self._otherwise.finished(request, outputs)


def runs_to_its_limit(request: Request) -> bool:
    """Whether its output has `max_tokens` tokens, come what may (an abort apart)."""
    params = request.params
    return params.ignore_eos and not request.stop_ids and not params.stop
