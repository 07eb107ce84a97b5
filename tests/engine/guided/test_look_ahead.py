"""Masks after drafts: those that the guide gives token by token, and a guide that only output changes."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.guide import GuideSpec, Thinking, Trigger
from roseinfer.core.outputs import SequenceOutput
from roseinfer.core.plan import Row, RowResult, StepPlan, StepResult, TokenLogprobs, TokenMasks
from roseinfer.engine.guided.constraints import GrammarConstraint
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.guided.guide import Guide, MaskSource
from roseinfer.engine.guided.guides import GuidedSequences, GuideEnd
from roseinfer.engine.guided.mask_bits import allow_all
from roseinfer.engine.guided.mask_budget import HostClock
from tests.helpers.cases import examples
from tests.helpers.guides import ArithmeticGuides, ToldClock
from tests.helpers.writing import CALL, PAIR, THINK, THOUGHT, TOKENS, VOCAB, Writing, framing, grammar_guides

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
    "messages": {"framing": framing()},
    "messages up to an answer": {"framing": framing(must_answer=True, budget=4), "grammar": BODY},
    "messages with triggers": {"framing": framing(budget=2), "triggers": (CALL_BODY,), "ends_after": 1},
    "bans": {"banned": (ord("b"), CALL)},
    "bans within all of it": {"grammar": BODY, "banned": (ord("b"), CALL), "thinking": THINKING},
}
INTERESTING = (*b"ab{}z#tfc", CALL, THINK, THOUGHT, PAIR)


class Made:
    """A pending guide that is there."""

    ready = True

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def make(self) -> Guide:
        return self._guide


def verifying(name: str, drafts: Sequence[int]) -> Row:
    count = 1 + len(drafts)
    return Row(name, 0, 10, count, count, True, 10, 0, (), tuple(drafts))


def space_of(count: int) -> memoryview:
    return memoryview(bytearray(4 * count * WORDS)).cast("I")


def allowed_by(masks: TokenMasks) -> dict[tuple[int, int], set[int]]:
    """Return the allowed tokens by row and number of drafts before them."""
    lines = [masks.words[at : at + WORDS] for at in range(0, len(masks.words), WORDS)]
    allowed = [{token for token in range(VOCAB) if line[token // 32] >> token % 32 & 1} for line in lines]
    places = zip(masks.rows, masks.drafts_before or [0] * len(lines), strict=True)
    return dict(zip(places, allowed, strict=True))


class IdleClock(HostClock):
    """Clock on a machine where no long call takes CPU time."""

    cpu_s = staticmethod(lambda: 0.0)


class Drafted:
    """One sequence whose rows have drafts, as the engine core drives it."""

    def __init__(self, **spec: object) -> None:
        self.sequences = GuidedSequences(GUIDES, VOCAB, IdleClock())
        self.sequences.open(["a:0"], Made(Writing(**spec).guide))
        self.plan = StepPlan(0, [])
        self.ended = False

    def masks(self, drafts: Sequence[int]) -> dict[int, set[int]]:
        """Return the allowed tokens by the number of drafts before them."""
        self.plan = StepPlan(self.plan.step + 1, [verifying("a:0", drafts)], num_drafts=len(drafts), guided=(0,))
        masks, ends = self.sequences.masks(self.plan, space_of)
        self.ended = bool(ends)
        assert all(end.error is None for end in ends) and set(masks.rows) <= {0}
        return {count: allowed for (_, count), allowed in allowed_by(masks).items()}

    def commit(self, token_ids: Sequence[int], error: str | None = None) -> tuple[tuple[int, ...], str | None]:
        """Take what the runner sampled. Return what becomes of it."""
        logprobs = tuple(TokenLogprobs(token, 0.0, 1, ()) for token in token_ids)
        result = StepResult(self.plan.step, [RowResult("a:0", tuple(token_ids), logprobs, None, error)])
        if self.plan.num_drafts:
            self.sequences.trim(self.plan, result)
        (got,) = result.rows
        assert got.logprobs == logprobs[: len(got.token_ids)]
        ends = self.sequences.advance([SequenceOutput("a:0", got.token_ids, got.logprobs)])
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


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@examples(20, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_forced_tokens_are_the_only_ones_allowed_and_legal_drafts_are_allowed(spec, seed: int) -> None:
    rng = random.Random(seed)
    output, _ = written(spec, rng)
    drafted = Drafted(**spec)
    sequences = drafted.sequences
    for done, token in enumerate(output):
        limit = rng.choice((1, 3, 20))
        forced = sequences.forced("a:0", limit)
        assert len(forced) <= limit
        assert [*expected_masks(spec, output[:done], forced)][: len(forced)] == [{each} for each in forced]
        drafts = drafts_before(rng, output[done:], 0.8, beyond=True)
        useful, legal = len([*expected_masks(spec, output[:done], drafts)]) - 1, sequences.legal("a:0", drafts)
        # Bans are not checked, nor what only a mask shows.
        assert legal == useful or "banned" in spec or DEAD_END.splitlines()[0] in str(spec), drafts
        drafted.masks([])
        drafted.commit([token])


def test_forced_tokens_go_on_after_the_last_words_of_reasoning() -> None:
    words = (*b"so", THOUGHT)
    thinking = Thinking(inside=True, begin=(THINK,), end=(THOUGHT,), budget=0, last_words=words)
    drafted = Drafted(grammar='start: "{name" /[a-z]/', thinking=thinking)
    assert drafted.sequences.forced("a:0", 2) == words[:2]
    assert drafted.sequences.forced("a:0", 3) == words
    assert drafted.sequences.forced("a:0", 20) == (*words, *b"{name")


def test_no_draft_completes_an_output_as_its_row_samples_the_last_token_in_any_case() -> None:
    sequences = Drafted(grammar='start: "abc"').sequences
    assert sequences.forced("a:0", 8) == (*b"ab",) and sequences.legal("a:0", b"abc") == 2
    assert sequences.forced("a:0", 2) == (*b"ab",) and sequences.legal("a:0", b"abx") == 2


def test_a_sequence_without_a_guide_has_no_forced_tokens_and_any_draft_is_legal() -> None:
    sequences = Drafted(grammar=BODY).sequences
    assert sequences.forced("b:0", 8) == () and sequences.legal("b:0", [1, 2, 3]) == 3


def test_a_guide_that_cannot_look_ahead_gets_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = Drafted(grammar=BODY)

    def fails(*_: object) -> None:
        raise RuntimeError("cannot")

    monkeypatch.setattr(GrammarConstraint, "forced", fails)
    monkeypatch.setattr(GrammarConstraint, "fork", fails)
    assert drafted.sequences.forced("a:0", 8) == () and drafted.sequences.legal("a:0", b"{a") == 0
    assert drafted.masks([]) == {0: {*b"{"}} and not drafted.ended


def test_an_error_after_the_end_of_the_output_does_not_count_and_one_before_it_does() -> None:
    drafted = Drafted(grammar='start: "ab"')
    drafted.masks(b"ab7")
    assert drafted.commit(b"ab", "no token is left") == ((*b"ab",), None) and drafted.ended
    drafted = Drafted(grammar='start: "ab"')
    drafted.masks(b"ab7")
    assert drafted.commit(b"a", "no token is left") == ((*b"a",), "no token is left") and not drafted.ended


def test_threads_compute_the_masks_of_many_rows_with_drafts() -> None:
    guides = GrammarGuideFactory(lambda: TOKENS, VOCAB, threads=3)
    spec = {"grammar": 'start: "{" /[a-z]{9}/ "}"'}
    pending = guides.prepare(GuideSpec(**spec))
    while not pending.ready:
        guides.wait(1.0)
    sequences = GuidedSequences(guides, VOCAB)
    rng = random.Random(0)
    drafts = [(ord("{"), *rng.choices(b"abcdef", k=rng.randrange(6)), ord("?")) for _ in range(40)]
    rows = [verifying(f"a:{sample}", own) for sample, own in enumerate(drafts)]
    sequences.open([row.request_id for row in rows], pending)
    plan = StepPlan(1, rows, num_drafts=sum(map(len, drafts)), guided=(*range(len(rows)),))
    masks, ends = sequences.masks(plan, space_of)
    found = allowed_by(masks)
    for row, own in enumerate(drafts):
        assert [found[row, count] for count in range(len(own))] == [*expected_masks(spec, [], own)]
    assert not ends and len(found) == sum(map(len, drafts))
    guides.close()


# --- time -------------------------------------------------------------------------------------------------------
class Costly:
    """Guide and grammar whose mask takes `cost_s(tokens so far)` on the test's clock. It allows every token."""

    ignores_output = edits_mask = accepting = halted = failed = False

    def __init__(self, clock: ToldClock, cost_s: Callable[[int], float], fails_at: int = -1) -> None:
        self._clock, self._cost_s, self._fails_at = clock, cost_s, fails_at
        self.said = 0

    def fork(self) -> "Costly":
        return copy(self)

    def forced(self, limit: int) -> Sequence[int]:
        return ()

    def advance(self, token_ids: Sequence[int]) -> bool:
        self.said += len(token_ids)
        return False

    def allows(self, token_ids: Sequence[int]) -> bool:
        return True

    def mask(self) -> "Costly":
        return self

    def fill(self, words: memoryview) -> None:
        if self.said == self._fails_at:
            raise ValueError("no memory")
        self._clock.run(self._cost_s(self.said))
        allow_all(words)

    def failure(self) -> Exception:
        return RuntimeError()

    def finish_mask(self, words: memoryview) -> bool:
        return False


class CostlyGuides(ArithmeticGuides):
    """Fills masks of `Costly` guides."""

    def __init__(self, clock: ToldClock) -> None:
        super().__init__(VOCAB)
        self._clock = clock

    def fill(self, sources: Sequence[MaskSource], words: memoryview, until_s=math.inf, *, threads=True) -> int:
        for at, source in enumerate(sources):
            source.fill(words[at * WORDS : (at + 1) * WORDS])
            if self._clock.wall_s() > until_s:
                return at + 1
        return len(sources)


class CostlySteps:
    """Sequences under `Costly` guides, which decode in steps that otherwise take `step_s`."""

    def __init__(self, cost_s: Callable[[int], float], *names: str, step_s: float = 0.01, fails_at: int = -1) -> None:
        self.clock = ToldClock()
        self.sequences = GuidedSequences(CostlyGuides(self.clock), VOCAB, self.clock)
        for name in names:
            self.sequences.open([name], Made(Costly(self.clock, cost_s, fails_at)))
        self._step, self._step_s = 0, step_s
        self.masked = 0
        self.drafted: Counter[str] = Counter()

    def step(self, count: int) -> list[GuideEnd]:
        """Run a step in which each row has up to `count` drafts, as many as are legal, and all are right."""
        drafts = (7,) * count
        rows = []
        for name in self.sequences.live:
            own = drafts[: self.sequences.legal(name, drafts)]
            rows.append(verifying(name, own))
        self._step += 1
        num_drafts = sum(len(row.drafts) for row in rows)
        plan = StepPlan(self._step, rows, num_drafts=num_drafts, guided=(*range(len(rows)),))
        self.clock.run(self._step_s)
        masks, ends = self.sequences.masks(plan, space_of)
        self.masked = len(masks.rows)
        self.drafted.update({row.request_id: len(row.drafts) for row in rows})
        self.sequences.close(end.sequence_id for end in ends)
        outputs = [SequenceOutput(row.request_id, (7,) * row.count) for row in rows]
        return ends + self.sequences.advance(outputs)


@pytest.mark.parametrize(("mask_s", "share"), [(40e-6, 1.0), (1.7e-3, 0.1)], ids=["quick", "slow"])
def test_drafts_end_no_request_and_are_few_while_its_masks_are_slow(mask_s: float, share: float) -> None:
    """Masks take at most a third of what a step forgives without drafts, and three times as much with drafts."""
    costly = CostlySteps(lambda said: mask_s, "a:0")
    assert not any(costly.step(8) for _ in range(500))
    assert costly.drafted["a:0"] <= share * 500 * 8 < 4 * costly.drafted["a:0"]


def test_a_step_that_pays_for_several_does_not_end_a_request() -> None:
    """Masks of all samples take a quarter of a step without drafts, and two steps with drafts."""
    costly = CostlySteps(lambda said: 0.003, *[f"a:{sample}" for sample in range(8)], step_s=0.1)
    assert not any(costly.step(8) for _ in range(200))


def test_a_slow_guide_takes_no_drafts_from_other_requests() -> None:
    costly = CostlySteps(lambda said: 40e-6, "a:0")
    costly.sequences.open(["b:0"], Made(Costly(costly.clock, lambda said: 1.7e-3)))
    for _ in range(100):
        costly.step(8)
    assert costly.drafted["a:0"] == 100 * 8 > 9 * costly.drafted["b:0"] > 0


def test_masks_after_drafts_that_all_turn_slow_at_once_take_a_bounded_time() -> None:
    """The first mask of each row is quick. Then the request ends with all of its samples."""
    names = [f"a:{sample}" for sample in range(64)]
    costly = CostlySteps(lambda said: 0.012 if said else 20e-6, *names, "b:0")
    began_s = costly.clock.wall_s()
    ends = costly.step(8)
    assert costly.clock.wall_s() - began_s < 0.5
    assert {end.sequence_id for end in ends} >= {*names} and all(end.error for end in ends)


def test_masks_after_drafts_that_cannot_be_computed_end_the_sequences_with_drafts() -> None:
    costly = CostlySteps(lambda said: 20e-6, "a:0", "b:0", fails_at=3)
    assert not costly.step(1) and costly.masked == 4
    ends = costly.step(1)
    assert {end.sequence_id for end in ends} == {"a:0", "b:0"} and all("no memory" in end.error for end in ends)
    assert not costly.sequences.live and costly.masked == 2
