"""Grammars of headers, and outputs that are drawn at random under them."""

import json
import random
from concurrent.futures import Future
from typing import Any

import pytest

from roseinfer.core.guide import GuideSpec
from roseinfer.core.plan import TokenMasks
from roseinfer.engine.guided.constraints import grammars_of, make_guide
from roseinfer.engine.guided.guide import Guide
from roseinfer.engine.guided.vocabulary import Vocabulary
from roseinfer.grammar.constraint import JsonOptions
from roseinfer.grammar.json_schema import schema_text
from roseinfer.grammar.library import Grammar, GrammarTokens, compile_grammar
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.harmony.format import Harmony
from roseinfer.text.harmony.headers import channels, header_grammar
from roseinfer.text.output import CallEnd, Event, TextBreak
from roseinfer.text.tools.base import Tool
from tests.text.tokenizers import harmony
from tests.text.tools.recorded import told

TOKENIZER = harmony()
FORMAT = Harmony(TOKENIZER)
VOCAB = TOKENIZER.backend.get_vocab_size()
EOS = (FORMAT.tokens.ret, FORMAT.tokens.call)
TOKENS = GrammarTokens.of(TOKENIZER, VOCAB, EOS)
ALL = channels(reasoning=True, preambles=True, answer=True)
NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
TOOLS = [Tool("f", NUMBER | {"additionalProperties": False}, strict=True), Tool("ff")]
BEGUN = tuple(TOKENIZER.encode("<|start|>assistant"))


def schemas(schema: Any, strict: bool) -> str:
    return schema_text(dict(schema), strict=strict, options=JsonOptions()).text


def compiled(**options: Any) -> Grammar:
    text = header_grammar(FORMAT.tokens, options.pop("named", ALL), schemas=schemas, **options)
    return compile_grammar(text, TOKENS)


def accepts(grammar: Grammar, header: str) -> bool | None:
    """Return True if the header is complete, False if it may go on, None if it is not allowed."""
    matcher = grammar.matcher()
    ids = TOKENIZER.encode(f"<|start|>assistant{header}", add_special_tokens=False)
    if not matcher.allows(ids):
        return None
    matcher.consume(ids)
    return matcher.accepting


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("<|channel|>analysis<|message|>", True),
        ("<|channel|>final<|message|>", True),
        ("<|channel|>final <|constrain|>json<|message|>", True),
        ("<|channel|>final json<|message|>", True),
        ("<|channel|>commentary<|message|>", True),
        ("<|channel|>commentary json<|message|>", None),
        ("<|channel|>commentary to=functions.f<|message|>", False),
        ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>", False),
        ("<|channel|>commentary to=functions.f json<|message|>", False),
        (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>", False),
        (' to=functions.f<|channel|>commentary<|message|>{"a": 7}', True),
        (' to=functions.f<|channel|>commentary<|message|>{"b"', None),
        (" to=functions.ff<|channel|>commentary<|message|>{}", True),
        (" to=functions.fff<|channel|>commentary<|message|>{}", None),
        (" to=python<|channel|>commentary<|message|>", None),
        ("<|channel|>analysis to=python code<|message|>", None),
        ("<|channel|>musings<|message|>", None),
        ("<|message|>", None),
        ("<|channel|>final", False),
    ],
)
def test_headers(header: str, accepted: bool | None) -> None:
    assert accepts(compiled(tools=TOOLS), header) is accepted


def test_other_functions_take_any_object() -> None:
    grammar = compiled(tools=TOOLS[:1], others=True)
    assert accepts(grammar, ' to=functions.fff<|channel|>commentary<|message|>{"b": 1}') is True
    assert accepts(grammar, ' to=functions.f<|channel|>commentary<|message|>{"b"') is None
    assert accepts(grammar, " to=functions.fff<|channel|>commentary<|message|>text") is None
    alone = compiled(others=True)
    assert accepts(alone, ' to=functions.f<|channel|>commentary<|message|>{"b": 1}') is True


def test_without_tools_there_is_no_recipient() -> None:
    grammar = compiled(named=channels(reasoning=False, preambles=False, answer=True))
    assert accepts(grammar, "<|channel|>final<|message|>") is True
    for other in (" to=", "<|channel|>c", "<|channel|>a", "<|channel|>final to="):
        assert accepts(grammar, other) is None


def allowed(guide: Guide) -> tuple[list[int] | None, bool]:
    """Return the tokens that may come next, None for all, and whether the output is complete."""
    mask = guide.mask()
    if mask is None:
        return None, False
    words, ended = mask, False
    if not isinstance(mask, memoryview):
        words = memoryview(bytearray(4 * TokenMasks.words_per_row(VOCAB))).cast("I")
        mask.fill(words)
        ended = guide.finish_mask(words)
    return [token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1], ended


def drawn(spec: GuideSpec, rng: random.Random) -> tuple[list[int], bool]:
    """Return a random output of at most 300 tokens, and whether it ended by itself. Marks are as likely as text."""
    future: Future[GrammarTokens] = Future()
    future.set_result(TOKENS)
    grammars = [compile_grammar(text, TOKENS) for text in grammars_of(spec)]
    guide = make_guide(spec, grammars, Vocabulary(VOCAB, future))
    marks = {*TOKENIZER.special_ids}
    ids: list[int] = []
    while len(ids) < 300:
        may, ended = allowed(guide)
        if ended:
            return ids, True
        may = [*range(VOCAB)] if may is None else may
        special = [token for token in may if token in marks]
        token = rng.choice(special if special and rng.random() < 0.3 else may)
        if token in EOS:
            return ids, True
        ids.append(token)
        if guide.advance((token,)):
            return ids, True
    return ids, False


def parsed(ids: list[int]) -> tuple[list[Event], int]:
    reader = FORMAT.parser(BEGUN, TOOLS)
    text = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False)
    events = [event for id in ids for event in reader.feed(text.add([id]), id)]
    return [event for event in events + reader.end() if not isinstance(event, TextBreak)], reader.failures


@pytest.mark.parametrize("budget", [None, 0, 6])
def test_random_outputs_that_must_answer_do(budget: int | None) -> None:
    named = [channels(reasoning, preambles=False, answer=True) for reasoning in (True, False)]
    headers = tuple(header_grammar(FORMAT.tokens, each, TOOLS[:1], schemas) for each in named)
    framing = FORMAT.framing(BEGUN, headers[: 1 if budget is None else 2], True, budget, "so")
    spec = GuideSpec(framing=framing, grammar=json.dumps({"grammars": [{"json_schema": TOOLS[0].schema}]}))
    rng = random.Random(5)
    ends = 0
    for _ in range(25):
        ids, ended = drawn(spec, rng)
        events, failures = parsed(ids)
        said = told(events)
        assert failures == 0 and all(kind != "text" for kind, *_ in said[:-1])
        if budget == 0:
            assert all(kind != "reasoning" for kind, *_ in said)
        if ended:
            ends += 1
            text = said[-1][2] if said[-1][0] == "call" else said[-1][1]
            assert isinstance(json.loads(text)["a"], int)
    assert ends > 5


def test_random_outputs_with_tools_have_no_malformed_call() -> None:
    headers = (header_grammar(FORMAT.tokens, ALL, TOOLS[:1], schemas, others=True),)
    spec = GuideSpec(framing=FORMAT.framing(BEGUN, headers, must_answer=False))
    rng = random.Random(6)
    calls = 0
    for _ in range(25):
        ids, ended = drawn(spec, rng)
        events, failures = parsed(ids)
        assert failures == 0
        calls += any(isinstance(event, CallEnd) and event.complete for event in events)
        assert all(event.complete for event in events if isinstance(event, CallEnd)) or not ended
    assert calls
