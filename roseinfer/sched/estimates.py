"""What policies with objectives know beforehand: what steps cost and how long outputs will be; and its options."""

from dataclasses import dataclass, field, replace

from roseinfer.core.config.option import check_choices, option
from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import ExpertChoice
from roseinfer.sched.cost.file import read_cost
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.lengths.estimators import LENGTH_ESTIMATORS, LengthEstimator, make_lengths

FAST = CostParams(step_s=1e-3, token_s=5e-6, pair_s=0.0, row_s=5e-6, context_s=1e-9)
FAST_EXPERTS_S = 1e-3  # all of them
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
    def of(cls, options: object, learnt: CostParams | None = None, experts: ExpertChoice | None = None) -> "Estimates":
        """Those that a policy's options ask for. `learnt`: what an engine like this one has learnt, which is newer than
        a `cost_model`. `experts`: the model's. Raises `ConfigError` for a `cost_model` that is none, or of a model with
        other experts; one without is taken for a guess.
        """
        estimates = cls()
        if isinstance(options, LengthOptions):
            estimates.lengths = make_lengths(options.length_estimator)
        if not isinstance(options, CostOptions):
            return estimates
        if learnt is not None:
            estimates.cost = CostModel(replace(learnt, experts=experts), trust=LEARNT_TRUST)
        elif options.cost_model is not None:
            estimates.cost = _from_file(options.cost_model, experts)
        elif experts is not None:
            estimates.cost = CostModel(
                replace(FAST, expert_s=FAST_EXPERTS_S / experts.count, experts=experts), trust=1.0
            )
        return estimates


def _from_file(path: str, experts: ExpertChoice | None) -> CostModel:
    params = read_cost(path)
    if params.experts == experts:
        return CostModel(params)
    if params.experts is not None:
        has = "none" if experts is None else f"{experts.top_k} of {experts.count}"
        of = f"{params.experts.top_k} of {params.experts.count} experts a token"
        raise ConfigError(f"cost_model: {path} is of a model with {of}; this one has {has}")
    return CostModel(replace(params, experts=experts), trust=LEARNT_TRUST)
