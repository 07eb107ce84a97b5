"""Estimates that policies with objectives plan with: step costs and output lengths, with their options."""

from dataclasses import dataclass, field, replace

from roseinfer.core.config.option import check_choices, option
from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import ExpertChoice
from roseinfer.core.step_cost import StepCost
from roseinfer.sched.cost.file import read_cost
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.yields import DraftYields
from roseinfer.sched.lengths.estimators import LENGTH_ESTIMATORS, LengthEstimator, make_lengths

FAST = CostParams(step_s=1e-3, token_s=5e-6, pair_s=0.0, row_s=5e-6, context_s=1e-9)
ALL_EXPERTS_S = 1e-3
# Standard deviation of constants that were learnt elsewhere: closer than a guess, and quickly overruled by steps.
LEARNT_TRUST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """Options of a policy that predicts step times."""

    cost_model: str | None = option(
        None, "initial cost model, written by `roseinfer calibrate`; default: learnt from scratch", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options of a policy that plans with the expected lengths of outputs."""

    length_estimator: str = option(
        "classifier",
        "output lengths: classifier = predictions that come with requests, corrected by their past errors, else as "
        "ecdf; ecdf = from outputs that have ended; oracle = predictions are exact",
        choices=LENGTH_ESTIMATORS,
    )

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(slots=True)
class Estimates:
    """Cost model, length estimator and yields of drafts, which learn while the engine runs.

    The initial cost is a fast machine's, so that no request is rejected for it, and the first steps overrule it.
    """

    cost: CostModel = field(default_factory=lambda: CostModel(FAST, trust=1.0))
    lengths: LengthEstimator = field(default_factory=lambda: make_lengths("classifier"))
    yields: DraftYields = field(default_factory=DraftYields)

    @classmethod
    def of(cls, options: object, learnt: CostParams | None = None, experts: ExpertChoice | None = None) -> "Estimates":
        """Return the estimates that a policy's options ask for.

        `learnt`: constants that a similar engine has learnt; they replace those of `cost_model`. `experts`: experts of
        the model. Raise `ConfigError` for an invalid `cost_model`, or one of a model with other experts. The constants
        of a model without experts serve as a first guess.
        """
        estimates = cls()
        if isinstance(options, LengthOptions):
            estimates.lengths = make_lengths(options.length_estimator)
        if not isinstance(options, CostOptions):
            return estimates
        if learnt is not None:
            estimates.cost = CostModel(replace(learnt, experts=experts), trust=LEARNT_TRUST_SHARE)
        elif options.cost_model is not None:
            estimates.cost = _from_file(options.cost_model, experts)
        elif experts is not None:
            estimates.cost = CostModel(
                replace(FAST, expert_s=ALL_EXPERTS_S / experts.count, experts=experts), trust=1.0
            )
        return estimates


def calibrated_cost(options: object) -> StepCost | None:
    """Return the costs that a policy's options give in a file. Raise `ConfigError` if it cannot be read."""
    given = isinstance(options, CostOptions) and options.cost_model
    return read_cost(given).published if given else None


def _from_file(path: str, experts: ExpertChoice | None) -> CostModel:
    params = read_cost(path)
    if params.experts == experts:
        return CostModel(params)
    if params.experts is not None:
        has = "none" if experts is None else f"{experts.top_k} of {experts.count}"
        of = f"{params.experts.top_k} of {params.experts.count} experts a token"
        raise ConfigError(f"cost_model: {path} is of a model with {of}; this one has {has}")
    return CostModel(replace(params, experts=experts), trust=LEARNT_TRUST_SHARE)
