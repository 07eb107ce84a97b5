"""Outputs with a parser: its input, the visible text, and the scope of stop strings."""

import gc
import random
import weakref
from dataclasses import asdict

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import End, FinishReason, FirstToken, RequestTimes, SequenceOutput
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.engine.live import InflightLimit, LiveRequests
from roseinfer.engine.output import ParsedSequenceText, merge
from roseinfer.text.output import CallArguments, CallEnd, CallStart, OutputParser, Reasoning, Text, joined
from roseinfer.text.tools.formats.hermes import Hermes
from tests.helpers.parsers import BracketParser
from tests.helpers.tokenizers import EOS_ID, byte_tokenizer
from tests.server.fake_engine import INFO

TOKENIZER = byte_tokenizer()
TIMES = RequestTimes(1.0, 2.0, 3.0, 9.0)
LENGTH = End(FinishReason.LENGTH, TIMES)
EOS = End(FinishReason.STOP, TIMES, stop_token=EOS_ID)


def outputs(tokens: list[int], cuts: list[int], end: End) -> list[SequenceOutput]:
    """Return the tokens as outputs of steps that end at `cuts`."""
    bounds = zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    started = FirstToken(3, 1.0, 2.0, 3.0)
    return [
        SequenceOutput(
            "a:0", tuple(tokens[a:b]), started=started if a == 0 else None, end=end if b == len(tokens) else None
        )
        for a, b in bounds
    ]


def merged(steps: list[SequenceOutput], params: SequenceParams, parser: OutputParser | None = None) -> SequenceChunk:
    """Return all chunks until the sequence ends, merged, with their events."""
    text, whole = ParsedSequenceText(0, params, TOKENIZER, parser or BracketParser()), None
    for output in steps:
        chunk = text.take(output, 5.0)
        assert chunk is not None
        whole = chunk if whole is None else merge(whole, chunk)
        if text.ended:
            whole.events = joined(whole.events)
            return whole
    raise AssertionError("it does not end")


def of(text: bytes, params: SequenceParams, end: End = LENGTH) -> SequenceChunk:
    tokens = list(text) + ([EOS_ID] if end is EOS else [])
    return merged(outputs(tokens, list(range(1, len(tokens))), end), params)


def test_events_in_order_and_the_text_is_the_content() -> None:
    chunk = of("(hé)Look: [f|{}] [g|1]".encode(), SequenceParams(), EOS)
    assert chunk.events == [
        Reasoning("hé"),
        Text("Look: "),
        CallStart(0, "call_0", "f"),
        CallArguments(0, "{}"),
        CallEnd(0),
        Text(" "),
        CallStart(1, "call_1", "g"),
        CallArguments(1, "1"),
        CallEnd(1),
    ]
    assert (chunk.text, chunk.reasoning_tokens, chunk.parse_failures) == ("Look:  ", 5, 0)
    assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP, None)


def test_a_call_that_is_cut_ends_as_one_that_is_not_complete() -> None:
    chunk = of(b"[f|{", SequenceParams())
    assert chunk.events == [CallStart(0, "call_0", "f"), CallArguments(0, "{"), CallEnd(0, complete=False)]
    assert (chunk.parse_failures, chunk.finish_reason) == (1, FinishReason.LENGTH)


def test_stop_strings_match_only_in_the_content() -> None:
    params = SequenceParams(stop=("ab",))
    chunk = of(b"(ab)xa[ab|ab]bab!", params)
    assert chunk.events == [
        Reasoning("ab"),
        Text("xa"),  # nor across a call
        CallStart(0, "call_0", "ab"),
        CallArguments(0, "ab"),
        CallEnd(0),
        Text("b"),
    ]
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("xab", FinishReason.STOP, "ab")
    assert bytes(chunk.token_ids) == b"(ab)xa[ab|ab]bab"


def test_text_that_may_begin_a_stop_string_comes_out_at_the_end() -> None:
    assert of(b"xa", SequenceParams(stop=("ab",))).events == [Text("xa")]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_special_tokens_are_shown_to_the_parser_that_wants_them(skip: bool, wanted: bool) -> None:
    """They come after the first byte of a character, whose second byte is missing."""
    tokens = [0xC3, EOS_ID, ord("x")]
    parser = BracketParser(frozenset({EOS_ID}) if wanted else frozenset())
    params = SequenceParams(skip_special_tokens=skip, ignore_eos=True)
    chunk = merged(outputs(tokens, [1, 2], LENGTH), params, parser)
    if wanted:
        assert parser.fed == [("", 0xC3), ("\ufffd", None), ("<eos>", EOS_ID), ("x", ord("x"))]
    elif skip:
        assert parser.fed == [("", 0xC3), ("", EOS_ID), ("\ufffdx", ord("x"))]
    assert chunk.text == ("\ufffdx" if skip and not wanted else "\ufffd<eos>x")


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_how_many_tokens_come_at_once_changes_nothing(min_tokens: int) -> None:
    rng = random.Random(7)
    params = SequenceParams(stop=("ab", "bcc"), min_tokens=min_tokens)
    stopped = 0
    for _ in range(400):
        tokens = [ord(rng.choice("abc([|])")) for _ in range(rng.randrange(1, 14))]
        end = LENGTH
        if rng.random() < 0.5:
            tokens, end = [*tokens, EOS_ID], EOS
        expected = merged(outputs(tokens, list(range(1, len(tokens))), end), params)
        cuts = sorted(rng.sample(range(1, len(tokens)), rng.randrange(len(tokens)))) if len(tokens) > 1 else []
        assert asdict(merged(outputs(tokens, cuts, end), params)) == asdict(expected)
        stopped += expected.stop_reason in params.stop
    assert stopped > 3


class Nobody:
    def put(self, chunk: SequenceChunk) -> None:
        pass

    def fail(self, error: RoseinferError) -> None:
        pass


def test_an_abandoned_output_leaves_no_reference_cycle() -> None:
    request = GenerateRequest(request_id="1", prompt=Prompt([1], SequenceParams()), parser=Hermes(TOKENIZER).parser)
    requests = LiveRequests(TOKENIZER, ManualClock(), InflightLimit(), "a")
    live = requests.make(request, Nobody(), INFO)
    requests.add(live)
    live.texts[0].take(SequenceOutput("a:0", tuple(b"Hi <tool_call>"), started=FirstToken(3, 1.0, 2.0, 3.0)), 5.0)
    gone = weakref.ref(live.texts[0]._parser)
    gc.collect()
    gc.disable()
    try:
        live.cancel()
        del live
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("stop", [(), ("!",)])
def test_an_ended_output_leaves_no_reference_cycle(stop: tuple[str, ...]) -> None:
    """A parser of calls is in the middle of its work."""
    parser = Hermes(TOKENIZER).parser()
    gone, steps = weakref.ref(parser), outputs(list(b"Hi <tool_call> no! no"), [], LENGTH)
    gc.collect()
    gc.disable()
    try:
        assert merged(steps, SequenceParams(stop=stop), parser).finish_reason is not None
        del parser
        assert gone() is None
    finally:
        gc.enable()
