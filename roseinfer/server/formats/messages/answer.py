"""Answers of /v1/messages: content blocks, whole or as events."""

import json
from typing import Any

import orjson
from orjson import dumps
from pydantic_core import from_json

from roseinfer.core.outputs import FinishReason
from roseinfer.server.formats.blocks import Block, Change, Ending, Grown, Kind, Opened, sse
from roseinfer.server.formats.messages.dialect import error_body
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.job import Job, Usage

PING = sse("ping", b'{"type":"ping"}')
# Kind of block -> type of the event's delta and its field.
_DELTAS = {
    Kind.REASONING: b'{"type":"thinking_delta","thinking":%b}',
    Kind.TEXT: b'{"type":"text_delta","text":%b}',
    Kind.CALL: b'{"type":"input_json_delta","partial_json":%b}',
}
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
# No client verifies signatures of reasoning.
SIGNATURE = ""


class MessageWriter:
    """Writer of messages, see `blocks.BlockWriter`."""

    filler = PING

    def __init__(self, job: Job) -> None:
        self._job = job

    def head(self, usage: Usage) -> bytes:
        message = self._message([], None, usage)
        return sse("message_start", dumps({"type": "message_start", "message": message}))

    def change(self, change: Change) -> bytes:
        block = change.block
        if isinstance(change, Grown):
            return _DELTA % (block.index, _DELTAS[block.kind] % dumps(change.text))
        if isinstance(change, Opened):
            start = {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
            return sse("content_block_start", dumps(start))
        signature = b""
        if block.kind is Kind.REASONING:
            signature = _DELTA % (block.index, dumps({"type": "signature_delta", "signature": SIGNATURE}))
        stop = {"type": "content_block_stop", "index": block.index}
        return signature + sse("content_block_stop", dumps(stop))

    def idle(self) -> bytes:
        return PING

    def tail(self, blocks: list[Block], ending: Ending, usage: Usage) -> bytes:
        delta = {
            "type": "message_delta",
            "delta": _stop_fields(ending),
            "usage": usage_fields(usage),
            **self._job.about,
        }
        return sse("message_delta", dumps(delta)) + sse("message_stop", b'{"type":"message_stop"}')

    def failure(self, blocks: list[Block], error: ApiError, usage: Usage) -> bytes:
        return sse("error", error_body(error))

    def whole(self, blocks: list[Block], ending: Ending, usage: Usage) -> dict[str, Any]:
        return self._message([_whole(block) for block in blocks], ending, usage)

    def _message(self, content: list[dict[str, Any]], ending: Ending | None, usage: Usage) -> dict[str, Any]:
        job = self._job
        message: dict[str, Any] = {
            "id": job.id,
            "type": "message",
            "role": "assistant",
            "model": job.model,
            "content": content,
        }
        message |= {"stop_reason": None, "stop_sequence": None} if ending is None else _stop_fields(ending)
        message |= {"usage": usage_fields(usage), **job.about}
        return message | {"warnings": list(job.warnings)} if job.warnings else message


def _stop_fields(ending: Ending) -> dict[str, str | None]:
    """Return the stop reason. `timeout` is ours: Anthropic has none that fits."""
    if ending.finish is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if ending.finish is not FinishReason.STOP:
        return {"stop_reason": ending.finish.value, "stop_sequence": None}
    if isinstance(ending.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_reason}
    return {"stop_reason": "tool_use" if ending.called else "end_turn", "stop_sequence": None}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return the usage. `input_tokens` excludes cached ones; cache writes are always 0."""
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return fields if usage.slo is None else fields | {"slo": usage.slo}


def _empty(block: Block) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind is Kind.CALL:
        return _empty(block) | {"input": _input(block.text)}
    return _empty(block) | {"thinking" if block.kind is Kind.REASONING else "text": block.text}


def _input(arguments: str) -> Any:
    """Return arguments as an object, verbatim; if cut, as far as they go."""
    if isinstance(_parsed(arguments), dict):
        return orjson.Fragment(arguments)
    partial = _parsed(arguments, allow_partial=True)
    # Not orjson, which limits the digits of numbers.
    return orjson.Fragment(json.dumps(partial)) if isinstance(partial, dict) else {}


def _parsed(arguments: str, allow_partial: bool = False) -> Any:
    """Return the parsed JSON, None if invalid."""
    try:
        return from_json(arguments, allow_inf_nan=False, allow_partial=allow_partial)
    except ValueError:
        return None
