"""Estimates that policies with objectives plan with: step costs and output lengths, with their options."""

from dataclasses import dataclass, field, replace

from roseinfer.core.config.option import check_choices, option
from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import WHOLE_CONTEXT, ContextReads, ExpertChoice
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
    def of(
        cls,
        options: object,
        learnt: CostParams | None = None,
        experts: ExpertChoice | None = None,
        reads: ContextReads = WHOLE_CONTEXT,
    ) -> "Estimates":
        """Return the estimates that a policy's options ask for.

        `learnt`: constants that a similar engine has learnt; they replace those of `cost_model`. `experts`, `reads`: of
        the model. Raise `ConfigError` for an invalid `cost_model`, or one of a model with other experts. The constants
        of a model without experts serve as a first guess.
        """
        estimates = cls()
        if isinstance(options, LengthOptions):
            estimates.lengths = make_lengths(options.length_estimator)
        if not isinstance(options, CostOptions):
            return estimates
        if learnt is not None:
            estimates.cost = CostModel(_of_model(learnt, experts, reads), trust=LEARNT_TRUST_SHARE)
        elif options.cost_model is not None:
            estimates.cost = _from_file(options.cost_model, experts, reads)
        else:
            expert_s = 0.0 if experts is None else ALL_EXPERTS_S / experts.count
            row_s = FAST.row_s + FAST.context_s * reads.state_tokens
            fast = replace(FAST, row_s=row_s, expert_s=expert_s)
            estimates.cost = CostModel(_of_model(fast, experts, reads), trust=1.0)
        return estimates


def calibrated_cost(options: object) -> StepCost | None:
    """Return the costs that a policy's options give in a file. Raise `ConfigError` if it cannot be read."""
    given = isinstance(options, CostOptions) and options.cost_model
    return read_cost(given).published if given else None


def _of_model(params: CostParams, experts: ExpertChoice | None, reads: ContextReads) -> CostParams:
    """Return constants that were found elsewhere for a model. Unless they say more, a chunk reads a recurrent state as
    fast as decoding rows read K/V.
    """
    before_s = params.chunk_context_s or (params.context_s if reads.state_tokens else 0.0)
    return replace(params, experts=experts, reads=reads, chunk_context_s=before_s)


def _from_file(path: str, experts: ExpertChoice | None, reads: ContextReads) -> CostModel:
    params = read_cost(path)
    if params.experts == experts and params.reads == reads:
        return CostModel(params)
    if params.experts not in (None, experts):
        has = "none" if experts is None else f"{experts.top_k} of {experts.count}"
        of = f"{params.experts.top_k} of {params.experts.count} experts a token"
        raise ConfigError(f"cost_model: {path} is of a model with {of}; this one has {has}")
    return CostModel(_of_model(params, experts, reads), trust=LEARNT_TRUST_SHARE)
