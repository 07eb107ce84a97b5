"""Metrics of objectives: who met them, who was turned away and why, and how much time was left."""

from roseinfer.core.slo import Rejection
from roseinfer.server.http.errors import SloUnattainable
from roseinfer.server.observe.metrics import ENGINE_INDEX, LABELS
from roseinfer.server.observe.tallies import Tallies
from roseinfer.server.request.account import PromptRun
from roseinfer.server.request.attainment import Outcome, class_of, cut_short, measured, outcome, slack_s
from roseinfer.server.request.job import Job

_LATE_S = (30, 10, 5, 2.5, 1, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001)
# Time to the first token is counted in seconds, time per token in milliseconds: both must find their buckets.
SLACK_S = (*(-bound for bound in _LATE_S), 0, *reversed(_LATE_S))


class SloMetrics:
    """Labels hold the names of the server's own classes, never what clients write. A request with several prompts
    counts once for each.
    """

    def __init__(self, tallies: Tallies, model_name: str) -> None:
        self._values = (model_name, ENGINE_INDEX)
        labels = (*LABELS, "slo_class", "outcome")
        self._requests = tallies.counters("roseinfer:slo_requests", "Prompts by how their objectives were kept", labels)
        labels = (*LABELS, "reason", "slo_class")
        help = "Prompts turned away because an objective was out of reach, by the objective"
        self._rejections = tallies.counters("roseinfer:slo_rejections", help, labels)
        labels = (*LABELS, "slo_class", "objective")
        help = "Objective less what the server saw, of prompts that finished; negative = late"
        self._slack = tallies.histograms("roseinfer:slo_slack_seconds", help, SLACK_S, labels)

    def ended(self, job: Job, runs: list[PromptRun], cause: BaseException | None) -> Outcome | None:
        """`cause`: what ended the request before its time. Returns the worst that became of a prompt, if it counts."""
        name = class_of(job)
        if cause is not None:
            early = cut_short(cause)
            if early is not None:
                self._requests.labels(*self._values, name, early).inc(len(job.prompts))
            if isinstance(cause, SloUnattainable):
                self._rejected(cause.rejection, name, len(job.prompts))
            return early
        outcomes = [self._finished(job, run, name) for run in runs]
        return next((each for each in outcomes if each is not Outcome.MET), Outcome.MET)

    def _finished(self, job: Job, run: PromptRun, name: str) -> Outcome:
        came = outcome(job.slo, run)
        self._requests.labels(*self._values, name, came).inc()
        seen = measured([run])
        if seen is not None and job.slo is not None and came is not Outcome.TIMEOUT:
            for objective, slack in slack_s(job.slo, seen).items():
                self._slack.labels(*self._values, name, objective).observe(slack)
        return came

    def _rejected(self, rejection: Rejection | None, name: str, prompts: int) -> None:
        reason = "unknown" if rejection is None else rejection.reason
        self._rejections.labels(*self._values, reason, name).inc(prompts)
