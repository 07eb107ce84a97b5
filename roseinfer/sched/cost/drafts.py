"""Cost of drafts: the seconds that verifying and making them adds to a step.

    seconds = v + d1 * D1 + d2 * D2 + d3 * D3 + k * KD + h * H + a * A

v: paid once by a step with any drafts. D1, D2, D3: its drafts, by how many tokens the step has with them: up to 16, up
to 128, and more. On a GPU the first are nearly free, because the weights are read anyway and products are padded; on a
CPU they are not. KD: context tokens before each draft, summed over the drafts.

H: draft steps of the runner's head at the end of the step, as many as the most drafts that a row wants. A: drafts that
the head makes, for all rows.
"""

from typing import NamedTuple

FEW_TOKENS, MANY_TOKENS = 16, 128
_KNEES_TOKENS = (FEW_TOKENS, MANY_TOKENS)
_GUESSED_VERIFY_SHARE = _GUESSED_HEAD_SHARE = 0.1  # of the constant cost of a step

Features = tuple[float, float, float, float, float, float, float]


class DraftCost(NamedTuple):
    """Seconds per step with drafts, per draft in small, middle and large steps, and per context token of a draft; per
    draft step of a head, and per draft that it makes.
    """

    verify_s: float = 0.0
    few_draft_s: float = 0.0
    draft_s: float = 0.0
    many_draft_s: float = 0.0
    draft_context_s: float = 0.0
    head_step_s: float = 0.0
    head_draft_s: float = 0.0

    @classmethod
    def guess(cls, step_s: float, token_s: float, pair_s: float) -> "DraftCost":
        """Return the costs until steps show them: those of prompt tokens, as if none were nearly free."""
        each = (token_s, token_s, token_s)
        return cls(_GUESSED_VERIFY_SHARE * step_s, *each, pair_s, _GUESSED_HEAD_SHARE * step_s, token_s)

    def seconds(self, features: Features) -> float:
        """Return what drafts add to a step with these `features`."""
        return sum([cost * count for cost, count in zip(self, features, strict=True)])

    def head_s(self, steps: int, drafts: int) -> float:
        """Return what a head's `steps` draft steps with `drafts` drafts take."""
        return steps * self.head_step_s + drafts * self.head_draft_s

    def one_more_s(self, tokens: float) -> float:
        """Return what a further draft takes in a step of `tokens` tokens, some of them drafts, without its context."""
        if tokens < FEW_TOKENS:
            return self.few_draft_s
        return self.draft_s if tokens < MANY_TOKENS else self.many_draft_s

    def slower(self, factor: float) -> "DraftCost":
        return DraftCost(*[factor * value for value in self])


def features(others: float, drafts: int, context: float, head_steps: int = 0, head_drafts: int = 0) -> Features:
    """Return v's and the other features of a step with `drafts` drafts beside `others` tokens.

    `context`: tokens before each draft, summed. `head_steps`, `head_drafts`: H and A.
    """
    few, middle = (max(0.0, min(others + drafts, knee) - min(others, knee)) for knee in _KNEES_TOKENS)
    return float(drafts > 0), few, middle - few, drafts - middle, context, head_steps, head_drafts
