"""Masks after drafts: those that the guide gives token by token, and a guide that only output changes."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.guide import Thinking, Trigger
from roseinfer.core.outputs import new_output
from roseinfer.core.plan import Row, RowResult, StepPlan, StepResult, TokenLogprobs, TokenMasks
from roseinfer.engine.guided.guide import Guide
from roseinfer.engine.guided.guides import GuidedSequences
from tests.helpers.cases import examples
from tests.helpers.writing import CALL, PAIR, THINK, THOUGHT, VOCAB, Writing, grammar_guides

GUIDES = grammar_guides()
WORDS = TokenMasks.words_per_row(VOCAB)
BODY = 'start: "{" /[a-z]{1,3}/ "}"'
# The grammar would allow more text after `a`, but no token can continue it: only a mask shows that it is complete.
DEAD_END = 'start: "a" more?\nmore: MORE\nMORE: /b/ & /c/'
CALL_BODY = Trigger(grammar=BODY, token_id=CALL)
THINKING = Thinking(inside=True, begin=(THINK,), end=(THOUGHT,))
SPECS = {
    "grammar": {"grammar": BODY},
    "forced text": {"grammar": 'start: "name" ("one" | "other" | "onerous")'},
    "a token for the text": {"grammar": 'start: "a>{b" /[01]/'},
    "an end in the grammar": {"grammar": 'start: "a" "b"? "c"?'},
    "an end that the mask shows": {"grammar": DEAD_END},
    "a token triggers": {"triggers": (CALL_BODY,), "ends_after": 2},
    "text triggers": {"triggers": (Trigger(grammar=BODY, text="ab"),), "ends_after": 1},
    "a triggered end that the mask shows": {"triggers": (Trigger(grammar=DEAD_END, token_id=CALL),), "ends_after": 2},
    "reasoning": {"grammar": BODY, "thinking": THINKING},
    "a budget": {
        "grammar": BODY,
        "thinking": Thinking(inside=True, begin=(THINK,), end=(THOUGHT,), budget=3, last_words=(*b"so", THOUGHT)),
    },
    "an end of several tokens": {
        "grammar": BODY,
        "thinking": Thinking(inside=True, begin=(), end=(*b"ab",), budget=5),
    },
    "reasoning before calls": {"triggers": (CALL_BODY,), "ends_after": 1, "thinking": THINKING},
    "bans": {"banned": (ord("b"), CALL)},
    "bans within all of it": {"grammar": BODY, "banned": (ord("b"), CALL), "thinking": THINKING},
}
INTERESTING = (*b"ab{}z", CALL, THINK, THOUGHT, PAIR)


class Made:
    """A pending guide that is there."""

    ready = True

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def make(self) -> Guide:
        return self._guide


class Drafted:
    """One sequence whose rows have drafts, as the engine core drives it."""

    def __init__(self, **spec: object) -> None:
        self.sequences = GuidedSequences(GUIDES, VOCAB)
        self.sequences.open(["a:0"], Made(Writing(**spec).guide))
        self.plan = StepPlan(0, [])
        self.ended = False

    def masks(self, drafts: Sequence[int]) -> dict[int, set[int]]:
        """Return the allowed tokens by the number of drafts before them."""
        count = 1 + len(drafts)
        row = Row("a:0", 0, 10, count, count, True, 10, 0, (), tuple(drafts))
        self.plan = StepPlan(self.plan.step + 1, [row], num_tokens=count, num_drafts=len(drafts), guided=(0,))
        masks, ends = self.sequences.masks(self.plan, lambda count: memoryview(bytearray(4 * count * WORDS)).cast("I"))
        self.ended = bool(ends)
        assert all(end.error is None for end in ends) and set(masks.rows) <= {0}
        lines = [masks.words[at : at + WORDS] for at in range(0, len(masks.words), WORDS)]
        allowed = [{token for token in range(VOCAB) if line[token // 32] >> token % 32 & 1} for line in lines]
        return dict(zip(masks.drafts_before or [0] * len(lines), allowed, strict=True))

    def commit(self, token_ids: Sequence[int], error: str | None = None) -> tuple[tuple[int, ...], str | None]:
        """Take what the runner sampled. Return what becomes of it."""
        logprobs = tuple(TokenLogprobs(token, 0.0, 1, ()) for token in token_ids)
        result = StepResult(self.plan.step, [RowResult("a:0", tuple(token_ids), logprobs, None, error)])
        if self.plan.num_drafts:
            self.sequences.trim(self.plan, result)
        (got,) = result.rows
        assert got.logprobs == logprobs[: len(got.token_ids)]
        ends = self.sequences.advance([new_output(("a:0", got.token_ids, got.logprobs, None, None, None))])
        self.ended = bool(ends)
        assert all(end.error is None for end in ends)
        return got.token_ids, got.error


def any_token(rng: random.Random, allowed: set[int] | None) -> int:
    """Draw an allowed token, often one of those that change something."""
    tokens = [token for token in INTERESTING if allowed is None or token in allowed]
    if tokens and rng.random() < 0.8:
        return rng.choice(tokens)
    return rng.choice(sorted(allowed or range(256)))


def written(spec: dict[str, object], rng: random.Random) -> tuple[list[int], str]:
    """Draw an output, most often up to its end, and say what shows this end: a "token", a "mask", or nothing."""
    output, token_ids = Writing(**spec), []
    while True:
        allowed = output.allowed()
        if output.ended:
            return token_ids, "mask"
        if len(token_ids) == 24:
            return token_ids, ""
        token_ids.append(any_token(rng, allowed))
        if output.say(token_ids[-1:]).ended:
            return token_ids, "token"


def drafts_before(rng: random.Random, rest: list[int], right: float, *, beyond: bool) -> list[int]:
    """Draw guesses of the rest of an output, perhaps with some `beyond` its end."""
    guesses = [*rest, *rng.choices(INTERESTING, k=3)] if beyond else rest[:-1]
    return [token if rng.random() < right else any_token(rng, None) for token in guesses[: rng.randrange(7)]]


def expected_masks(spec: dict[str, object], said: list[int], drafts: Sequence[int]) -> Iterator[set[int] | None]:
    """Yield what each token may be, as far as the guide follows the drafts."""
    output = Writing(**spec).say(said)
    for draft in (*drafts, None):
        allowed = output.allowed()
        if output.ended:
            return
        yield allowed
        if draft is None or not (allowed is None or draft in allowed) or output.say([draft]).ended:
            return


def sampled(rest: list[int], drafts: Sequence[int]) -> list[int]:
    """Return the tokens that a runner returns if the output goes on with `rest`, and then as the drafts say."""
    tokens = []
    for draft, token in zip((*drafts, None), [*rest, *drafts[len(rest) :], 7], strict=False):
        tokens.append(token)
        if token != draft:
            break
    return tokens


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@examples(40, derandomize=True)
@given(seed=st.integers(0, 10**6), right=st.sampled_from([0.5, 0.9, 1.0]))
def test_masks_after_drafts_are_those_of_the_same_output_without_drafts(spec, seed: int, right: float) -> None:
    rng = random.Random(seed)
    output, shown_by = written(spec, rng)
    drafted, done = Drafted(**spec), 0
    while done < len(output):
        drafts = drafts_before(rng, output[done:], right, beyond=bool(shown_by))
        masks = drafted.masks(drafts)
        for count, allowed in enumerate(expected_masks(spec, output[:done], drafts)):
            assert masks.get(count) == allowed, (output[:done], drafts, count)
        assert not drafted.ended
        kept, _ = drafted.commit(sampled(output[done:], drafts))
        assert [*kept] == output[done : done + len(kept)]
        done += len(kept)
    if shown_by == "mask" and not drafted.ended:  # no mask after the last token has been made
        drafted.masks([])
    assert drafted.ended == bool(shown_by)
