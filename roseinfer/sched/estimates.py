"""What policies with objectives know beforehand: what steps cost and how long outputs will be; and its options."""

from dataclasses import dataclass, field

from roseinfer.core.option import check_choices, option
from roseinfer.sched.cost import CostModel, CostParams
from roseinfer.sched.cost_file import read_cost
from roseinfer.sched.lengths import LENGTH_ESTIMATORS, LengthEstimator, make_lengths

FAST = CostParams(step_s=1e-3, token_s=5e-6, pair_s=0.0, row_s=5e-6, context_s=1e-9)
# Another machine's constants, and not all of them: nearer than a guess, and given up when steps say otherwise.
LEARNT_TRUST = 0.1


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """Options of a policy that predicts step times."""

    cost_model: str | None = option(
        None, "what steps cost, to begin with, from `roseinfer calibrate`; default: learnt from scratch", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options of a policy that plans with the expected lengths of outputs."""

    length_estimator: str = option(
        "classifier",
        "output lengths: classifier = predictions that come with requests, for what they proved worth, else as ecdf; "
        "ecdf = from those that have ended; oracle = predictions are true",
        choices=LENGTH_ESTIMATORS,
    )

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(slots=True)
class Estimates:
    """What steps cost, and how long outputs will be. Both learn as they go.

    The first guess of the cost is a fast machine's, and given up at the first steps: a policy turns nobody away for it.
    """

    cost: CostModel = field(default_factory=lambda: CostModel(FAST, trust=1.0))
    lengths: LengthEstimator = field(default_factory=lambda: make_lengths("classifier"))

    @classmethod
    def of(cls, options: object, learnt: CostParams | None = None) -> "Estimates":
        """Those that a policy's options ask for. `learnt`: what an engine like this one has learnt, which is newer than
        a `cost_model`. Raises `ConfigError` for one that is none.
        """
        estimates = cls()
        if isinstance(options, LengthOptions):
            estimates.lengths = make_lengths(options.length_estimator)
        if isinstance(options, CostOptions) and options.cost_model is not None:
            estimates.cost = CostModel(read_cost(options.cost_model))
        if isinstance(options, CostOptions) and learnt is not None:
            estimates.cost = CostModel(learnt, trust=LEARNT_TRUST)
        return estimates
