"""Parser events as deltas or messages of OpenAI's chat API.

Clients use two names for reasoning, `reasoning_content` and `reasoning`: answers have both. A message has one content,
so texts that are messages of their own become paragraphs.
"""

from collections.abc import Sequence
from typing import Any

from orjson import dumps

from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, Reasoning, Text, TextBreak

_PARAGRAPH = "\n\n"


def delta(events: Sequence[Event]) -> bytes:
    """Return the `delta` of a chunk; `{}` without content."""
    if len(events) == 1:  # the usual case
        event = events[0]
        if isinstance(event, CallArguments):
            arguments = dumps(event.text)
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (event.index, arguments)
        if isinstance(event, Reasoning):
            text = dumps(event.text)
            return b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
    fields: dict[str, Any] = {}
    for event in events:
        if isinstance(event, Text):
            fields["content"] = fields.get("content", "") + event.text
        elif isinstance(event, TextBreak):
            fields["content"] = fields.get("content", "") + _PARAGRAPH
        elif isinstance(event, Reasoning):
            fields["reasoning_content"] = fields["reasoning"] = fields.get("reasoning", "") + event.text
        elif not isinstance(event, CallEnd):
            _add_to_calls(fields.setdefault("tool_calls", []), event)
    return dumps(fields)


def _add_to_calls(calls: list[dict[str, Any]], event: CallStart | CallArguments) -> None:
    """Add a part of a call. Send `id`, `type` and `name` once: clients concatenate all parts of an index."""
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        calls.append({"index": event.index, "id": event.id, "type": "function", "function": function})
        return
    if not calls or calls[-1]["index"] != event.index:
        calls.append({"index": event.index, "function": {"arguments": ""}})
    calls[-1]["function"]["arguments"] += event.text


def message(events: Sequence[Event]) -> dict[str, Any]:
    """Return the `message` of a whole answer. A cut call is included. Without calls, its content is a text."""
    texts = [event for event in events if isinstance(event, Text | TextBreak)]
    content = "".join([event.text if isinstance(event, Text) else _PARAGRAPH for event in texts])
    reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
    calls = [event for event in events if isinstance(event, CallStart)]
    said: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        said |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        said["tool_calls"] = [_whole_call(call, events) for call in calls]
    return said


def _whole_call(call: CallStart, events: Sequence[Event]) -> dict[str, Any]:
    parts = [event.text for event in events if isinstance(event, CallArguments) and event.index == call.index]
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(parts)}}
