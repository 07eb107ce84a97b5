"""Grammars of an engine: compiled once and cached; requests wait for their own grammar only."""

import threading
import time
from concurrent.futures import Future, wait

import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec, Trigger
from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import TokenMasks
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided import grammar_cache as shelf_module
from roseinfer.engine.guided.grammar_cache import MAX_HITS_BEFORE_TRIM, GrammarCache, GrammarGuideFactory
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import Abort, Add, Invalid
from roseinfer.grammar.library import GrammarError, GrammarTokens, MaskThreads, MatcherError, UnsupportedTokenizerError
from roseinfer.grammar.memory import estimate_memory
from tests.engine.test_loop import Script
from tests.helpers.engines import Collected, add, gather, make_core, run_dry
from tests.helpers.writing import TOKENS, VOCAB, grammar_guides

PROMPT = [5, 9, 2, 7]
LETTERS = "start: /[a-z]{5}/"


def done(future: Future, timeout_s: float = 30) -> Future:
    wait([future], timeout_s)
    return future


def test_a_grammar_is_compiled_once():
    shelf = GrammarCache(lambda: TOKENS)
    first = shelf.grammar(LETTERS)
    assert shelf.grammar(LETTERS) is first and done(first).result().matcher()
    assert shelf.grammar(LETTERS) is first
    assert (shelf.compiled, shelf.cached, len(shelf)) == (1, 2, 1)
    shelf.close()


def test_the_least_recently_used_grammar_is_dropped_first():
    shelf = GrammarCache(lambda: TOKENS, max_grammars=2)
    one, two = shelf.grammar('start: "1"'), shelf.grammar('start: "2"')
    assert shelf.grammar('start: "1"') is one
    shelf.grammar('start: "3"')
    assert shelf.grammar('start: "1"') is one and len(shelf) == 2
    assert shelf.grammar('start: "2"') is not two
    shelf.close()


def test_the_cache_is_bounded_in_bytes_but_keeps_the_newest():
    shelf = GrammarCache(lambda: TOKENS, max_bytes=300_000)
    grammars = [shelf.grammar(f'start: "{i}"') for i in range(8)]
    assert len(shelf) == 3
    large = shelf.grammar('start: "' + "x" * 10_000 + '"')
    assert len(shelf) == 1 and len(done(large).result().text.encode()) > 10_000
    assert all(done(grammar).result() for grammar in grammars), "who waits for one that went gets it"
    shelf.close()


def test_the_growth_of_a_grammar_counts():
    """Memory grows with every 24 masks up to 200, then with the square root of their number."""
    shelf = GrammarCache(lambda: TOKENS, max_bytes=1_000_000)
    first, second = (done(shelf.grammar(f"start: /[a-z]{{{i}}}/", (10_000, 50_000))).result() for i in (4, 5))
    assert shelf.taken_bytes == 20_000
    first.masks = 24
    assert shelf.taken_bytes == 70_000
    first.masks = 48
    assert shelf.taken_bytes == 120_000
    first.masks = 200
    grown = shelf.taken_bytes - 20_000
    first.masks = 800
    assert shelf.taken_bytes == pytest.approx(20_000 + 2 * grown, rel=1e-4)
    first.masks = 48
    shelf.grammar("start: /x/", (850_000, 0))
    assert len(shelf) == 3
    second.masks = 24
    for _ in range(MAX_HITS_BEFORE_TRIM):
        shelf.grammar("start: /x/")
    assert len(shelf) == 2 and shelf.taken_bytes <= 1_000_000
    shelf.close()


def test_a_grammar_that_has_grown_large_is_compiled_again_for_later_outputs():
    shelf = GrammarCache(lambda: TOKENS, max_bytes=1_000_000)
    grown = shelf.grammar(LETTERS, (10_000, 60_000))
    done(grown).result().masks = 24 * 4
    assert shelf.grammar(LETTERS, (10_000, 60_000)) is grown
    grown.result().masks = 24 * 5
    again = shelf.grammar(LETTERS, (10_000, 60_000))
    assert again is not grown and len(shelf) == 1 and shelf.taken_bytes == 10_000
    large = shelf.grammar('start: "x"', (900_000, 0))
    assert done(large) and shelf.grammar('start: "x"') is large, "what is large from the start is kept"
    shelf.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_masks_are_counted_by_grammar(threads: int):
    shelf = GrammarCache(lambda: TOKENS)
    grammar = done(shelf.grammar(LETTERS)).result()
    matchers = [grammar.matcher() for _ in range(20)]
    for matcher in matchers[:18]:
        matcher.consume(b"abc")
        assert matcher.fork().forced(8) == []
    assert grammar.masks == 0
    MaskThreads(threads).fill(matchers, memoryview(bytearray(20 * 4 * TokenMasks.words_per_row(VOCAB))).cast("I"))
    assert grammar.masks == 18, "the first mask of an output is the grammar's"
    shelf.close()


def test_a_grammar_that_has_failed_is_compiled_again_for_later_outputs():
    """The grammar has a limit of states, so all later outputs would fail as well."""
    shelf = GrammarCache(lambda: TOKENS)
    failed = shelf.grammar(LETTERS)
    with pytest.raises(MatcherError):
        done(failed).result().matcher().consume(list(b"a1"))
    assert shelf.grammar(LETTERS) is not failed and len(shelf) == 1
    shelf.close()


def test_unmeasured_memory_is_estimated_from_the_text():
    literal = estimate_memory('{"enum":["' + "a" * 8000 + '"]}')
    schema = estimate_memory('{"properties":{' + ",".join(f'"name{i}":{{"type":"string"}}' for i in range(300)) + "}}")
    assert literal.base > 2_900_000 and schema.base < 1_000_000
    assert estimate_memory('{"maxLength":10}').growth > estimate_memory('{"minimum":100}').growth


def test_a_grammar_that_does_not_compile_is_not_cached():
    shelf = GrammarCache(lambda: TOKENS)
    with pytest.raises(GrammarError):
        done(shelf.grammar("start: nothing")).result()
    assert shelf.grammar("start: nothing").exception() is not None
    assert (shelf.compiled, shelf.cached, len(shelf)) == (2, 0, 1)
    shelf.close()


def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come")


def test_a_grammar_of_several_outputs_gets_lanes():
    guides = GrammarGuideFactory(lambda: TOKENS, VOCAB, threads=3)
    spec, other = GuideSpec(grammar=LETTERS), GuideSpec(grammar='start: "x"')
    pendings = [guides.prepare(one) for one in (spec, spec, other)]
    until(lambda: all(pending.ready for pending in pendings))
    followed, alone = (done(guides.cache.grammar(one.grammar)).result() for one in (spec, other))
    pendings[0].make()
    pendings[2].make()
    assert not followed.wide
    pendings[1].make()
    until(lambda: followed.wide)
    assert (followed.lanes, alone.lanes, alone.wide) == (3, 1, False)
    pendings[1].make()
    assert followed.lanes == 3 and guides.stats().grammars == 2
    guides.close()


@pytest.mark.parametrize("why", ["no threads", "no room"])
def test_without_threads_or_room_a_grammar_has_one_lane(why: str):
    guides = GrammarGuideFactory(lambda: TOKENS, VOCAB, threads=1 if why == "no threads" else 3)
    guides.cache.max_bytes = 100_000 if why == "no room" else 2**26
    pending = guides.prepare(GuideSpec(grammar=LETTERS))
    until(lambda: pending.ready)
    grammar = done(guides.cache.grammar(LETTERS)).result()
    for _ in range(3):
        pending.make()
    assert (grammar.wide, grammar.lanes) == (True, 1)
    guides.close()


class SlowTokens:
    """Vocabulary that is loaded when the test allows it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.come = threading.Event()
        self._error = error

    def __call__(self) -> GrammarTokens:
        assert self.come.wait(30)
        if self._error is not None:
            raise self._error
        return TOKENS


def slow_core(error: Exception | None = None, **options) -> tuple[EngineCore, SlowTokens]:
    tokens = SlowTokens(error)
    return make_core(guides=GrammarGuideFactory(tokens, VOCAB), vocab_size=VOCAB, **options), tokens


def until_released(core: EngineCore, collected: dict[str, Collected]) -> None:
    for _ in range(10_000):
        if core.stats().guides.waiting == 0:
            return
        gather(core.step(), collected)
    raise AssertionError("it still waits")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_waits_for_its_grammar_and_delays_no_other(depth: int):
    core, tokens = slow_core(depth=depth)
    add(core, "guided", PROMPT, n=2, guide=LETTERS, seed=1, max_tokens=9)
    assert core.busy and not core.scheduler.has_work, "the policy has not heard of it"
    add(core, "free", PROMPT, max_tokens=3, ignore_eos=True)
    collected: dict[str, Collected] = {}
    for _ in range(6):
        gather(core.step(), collected)
    assert collected["free:0"].reason is FinishReason.LENGTH and set(collected) == {"free:0"}
    assert core.stats().guides.waiting == 1 and core.busy and not core.idle_turn
    tokens.come.set()
    until_released(core, collected)
    run_dry(core, collected)
    assert all(bytes(collected[name].tokens).isalpha() for name in ("guided:0", "guided:1"))
    assert collected["guided:0"].end.reason is FinishReason.STOP
    assert core.stats().guides.waiting == 0


def test_times_of_a_request_start_at_its_arrival_not_when_its_grammar_is_ready():
    core, tokens = slow_core()
    core.add(
        Add(
            "a", Prompt(PROMPT, SequenceParams(max_tokens=9), RequestMeta(arrival_s=3.0), GuideSpec(grammar=LETTERS)), 1
        )
    )
    tokens.come.set()
    collected: dict[str, Collected] = {}
    until_released(core, collected)
    assert run_dry(core, collected)["a:0"].end.times.arrival_s == 3.0


def test_a_request_that_waits_for_its_grammar_can_be_aborted_or_expire():
    core, tokens = slow_core()
    add(core, "a", PROMPT, n=2, guide=LETTERS)
    late = RequestMeta(arrival_s=0.0, deadline_s=5.0)
    core.add(Add("late", Prompt(PROMPT, SequenceParams(max_tokens=9), late, GuideSpec(grammar=LETTERS)), 2))
    collected: dict[str, Collected] = {}
    core.abort(["a:1"])
    gather(core.step(), collected)
    assert {name: one.reason for name, one in collected.items()} == {"a:1": FinishReason.ABORT}
    core.clock.advance(6.0)
    gather(core.step(), collected)
    assert [collected[f"late:{i}"].reason for i in (0, 1)] == [FinishReason.TIMEOUT] * 2
    core.abort(["a:0", "late:0", "never"])
    gather(core.step(), collected)
    assert collected["a:0"].reason is FinishReason.ABORT and not core.busy
    tokens.come.set()


def test_a_request_that_cannot_run_is_rejected_before_its_grammar_compiles():
    core, tokens = slow_core(num_blocks=4)
    with pytest.raises(InvalidRequestError, match="context"):
        add(core, "a", PROMPT * 30, guide=LETTERS)
    add(core, "b", PROMPT, guide=LETTERS)
    with pytest.raises(InvalidRequestError, match="in use"):
        add(core, "b", PROMPT, guide=LETTERS)
    assert core.stats().guides.waiting == 1
    core.abort(["b:0"])
    tokens.come.set()


@pytest.mark.parametrize(
    ("spec", "error", "code"),
    [
        (GuideSpec(grammar="start: nothing"), None, "invalid_grammar"),
        (GuideSpec(triggers=(Trigger(grammar="start: (", text="x"),)), None, "invalid_grammar"),
        (GuideSpec(grammar=LETTERS), UnsupportedTokenizerError("no pieces"), "unsupported_tokenizer"),
    ],
)
def test_an_unusable_grammar_ends_its_request_as_invalid(spec, error, code):
    core, tokens = slow_core(error)
    clock = core.clock
    new = Add("a", Prompt(PROMPT, SequenceParams(max_tokens=4), guide=spec), 2)
    other = Add("other", Prompt(PROMPT, SequenceParams(max_tokens=4, ignore_eos=True)))
    script = Script(core, clock, [(1, new), (2, other)])
    tokens.come.set()
    EngineLoop(core, script, script, clock).run()
    answers = [(client, message) for _, client, message in script.sent if isinstance(message, Invalid)]
    ((client, rejected),) = answers
    assert (client, rejected.request_id, rejected.code) == (1, "a", code)
    assert script.tokens(2) == {"other:0": 4} and script.tokens(1) == {}
    assert core.stats().guides.refused == 1 and core.stats().guides.waiting == 0 and not core.guided.live


def test_an_aborted_request_gets_no_error_of_its_grammar():
    core, tokens = slow_core()
    new = Add("a", Prompt(PROMPT, SequenceParams(), guide=GuideSpec(grammar=LETTERS)))
    script = Script(core, core.clock, [(1, new)], [(1, Abort(["a:0"]))])
    EngineLoop(core, script, script, core.clock).run()
    assert core.stats().guides.waiting == 0 and not [m for _, _, m in script.sent if isinstance(m, Invalid)]
    tokens.come.set()


def test_compilation_has_a_timeout(monkeypatch):
    core, tokens = slow_core()
    add(core, "a", PROMPT, guide=LETTERS)
    monkeypatch.setattr(shelf_module, "monotonic", lambda: float("inf"))
    core.step()
    ((new, error),) = core.take_invalid()
    assert (new.request_id, error.code) == ("a", "grammar_too_complex")
    assert not core.busy and core.take_invalid() == []
    tokens.come.set()


def test_token_ids_outside_the_vocabulary_are_rejected():
    core = make_core(guides=grammar_guides(), vocab_size=VOCAB)
    for spec in (GuideSpec(banned=(VOCAB,)), GuideSpec(triggers=(Trigger(grammar=LETTERS, token_id=-1),))):
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            core.add(Add("a", Prompt(PROMPT, SequenceParams(), guide=spec)))
    assert not core.busy
