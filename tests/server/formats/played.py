"""Made-up outputs through a format: what comes of them, streamed and whole."""

import json
from typing import Any

import orjson

from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.inference import AnswerFormat
from roseinfer.server.request.job import Job, StreamChoices, Usage
from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from tests.helpers.parsers import BracketParser
from tests.helpers.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
USAGE = Usage(7, 9, 2, 4)
# (event, data) of server-sent events.
Events = list[tuple[str, dict[str, Any]]]


def call(index: int, name: str, *arguments: str, complete: bool = True) -> list[Event]:
    parts = [CallArguments(index, part) for part in arguments]
    return [CallStart(index, f"call_{index}", name), *parts, CallEnd(index, complete)]


# Thinks, talks and makes two calls.
BUSY: list[Event] = [
    Reasoning("Hm, "),
    Reasoning("so."),
    Text("\n\n"),
    Text("Let me"),
    Text(" see.\n"),
    *call(0, "look", '{"at":', ' "x"}'),
    Text("\n"),
    *call(1, "wait"),
]


def chunks(
    events: list[Event], finish: FinishReason = FinishReason.STOP, stop_reason: int | str | None = None
) -> list[SequenceChunk]:
    """A token for each event, and one for the end."""
    found = [SequenceChunk(0, token_ids=[1], events=[event], num_output_tokens=i) for i, event in enumerate(events)]
    return [*found, SequenceChunk(0, token_ids=[0], events=[], finish_reason=finish, stop_reason=stop_reason)]


def job_of(stream: StreamChoices | None = None, **fields: Any) -> Job:
    prompt = Prompt(ids=[1] * 7, params=SequenceParams())
    head = {"api": "x", "id": "the-id", "request_id": "r", "model": "m", "created": 5, "arrival_s": 0.0}
    return Job(**head, prompts=(prompt,), parser=BracketParser, stream=stream, **fields)


def streamed(kind: AnswerFormat, given: list[SequenceChunk], error: ApiError | None = None, **fields: Any) -> Events:
    """The events of a stream, which fails behind what is given if there is an error."""
    encoder = kind.events(job_of(StreamChoices(), **fields), TOKENIZER, lambda: USAGE)
    sent = b""
    for chunk in given:
        assert encoder.plain(0, chunk) is None and encoder.add(0, chunk)
        sent += encoder.encode(encoder.take())
    return parsed(sent + (encoder.tail(USAGE) if error is None else encoder.failure(error)))


def parsed(sent: bytes) -> Events:
    found: Events = []
    *events, end = sent.decode().split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        fields = json.loads(data[6:])
        assert fields["type"] == name[7:]
        found.append((name[7:], fields))
    return found


def whole(kind: AnswerFormat, given: list[SequenceChunk], **fields: Any) -> dict[str, Any]:
    body = kind.whole(job_of(**fields), TOKENIZER)
    for chunk in given:
        body.add(0, chunk)
    return orjson.loads(orjson.dumps(body.body(USAGE)))
