"""Answers of /v1/responses: items, whole or as events."""

import time
from typing import Any

from orjson import dumps

from roseinfer.core.outputs import FinishReason
from roseinfer.server.formats.answers import KEEP_ALIVE
from roseinfer.server.formats.blocks import Block, Change, Closed, Ending, Grown, Kind, Opened, sse
from roseinfer.server.formats.responses.tool_kinds import FUNCTION, CallName, Events, ToolKind
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.job import Job, Usage

_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg"}
# Names of failures that OpenAI's API has; the message says more.
_FAILED = "server_error"
# Code of the error that ends a response which a client has cancelled.
CANCELLED = "cancelled"


class ResponseWriter:
    """Writer of responses, see `blocks.BlockWriter`. Events of a stream are numbered from 0."""

    filler = KEEP_ALIVE

    def __init__(self, job: Job) -> None:
        self._job = job
        self._events = 0

    def head(self, usage: Usage) -> bytes:
        response = self._response("in_progress", [])
        if self._job.about.get("background"):
            self._keep(response)
        events = [self._event(f"response.{name}", {"response": response}) for name in ("created", "in_progress")]
        return b"".join(events)

    def change(self, change: Change) -> bytes:
        block = change.block
        if block.kind is Kind.CALL and self._known(block).kind.late:
            return self._complete_call(block) if isinstance(change, Closed) else b""
        if isinstance(change, Grown):
            return self._contents(block, self._grown(block, change.text))
        return self._opened(block) if isinstance(change, Opened) else self._closed(block)

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def tail(self, blocks: list[Block], ending: Ending, usage: Usage) -> bytes:
        response = self.whole(blocks, ending, usage)
        return self._event(f"response.{response['status']}", {"response": response})

    def failure(self, blocks: list[Block], error: ApiError, usage: Usage) -> bytes:
        more: dict[str, Any] = {"error": {"code": error.code or _FAILED, "message": error.message, **error.advice()}}
        more["usage"] = usage_fields(usage)
        output = [self._item(block, "completed" if block.complete else "incomplete") for block in blocks]
        response = self._response("cancelled" if error.code == CANCELLED else "failed", output) | more
        self._keep(response)
        return self._event("response.failed", {"response": response})

    def queued(self) -> dict[str, Any]:
        """Return the response before its run."""
        return self._response("queued", [])

    def whole(self, blocks: list[Block], ending: Ending, usage: Usage) -> dict[str, Any]:
        complete = ending.finish is FinishReason.STOP
        output = [self._item(block, _status(block)) for block in blocks]
        response = self._response("completed" if complete else "incomplete", output)
        if not complete:
            length = ending.finish is FinishReason.LENGTH
            response["incomplete_details"] = {"reason": "max_output_tokens" if length else ending.finish.value}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = usage_fields(usage)
        self._keep(response)
        return response

    def _keep(self, response: dict[str, Any]) -> None:
        if self._job.store_answer is not None:
            self._job.store_answer(response)

    # --- the response ---------------------------------------------------------------------------------------------
    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._job
        response = {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": job.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **job.about,
        }
        return response | {"warnings": list(job.warnings)} if job.warnings else response

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind is Kind.REASONING:
            parts = [{"type": "reasoning_text", "text": block.text}] if status != "in_progress" else []
            return {"type": "reasoning", **item, "summary": [], "content": parts}
        if block.kind is Kind.TEXT:
            parts = [_text_part(block.text)] if status != "in_progress" else []
            return {"type": "message", **item, "role": "assistant", "content": parts}
        return self._call(block, item)

    def _call(self, block: Block, item: dict[str, Any]) -> dict[str, Any]:
        known, kind = self._known(block), self._kind(block)
        fields = (kind.begun if item["status"] == "in_progress" else kind.call)(known, block.text)
        return {"type": kind.item, **item, "call_id": block.call_id, **fields}

    def _known(self, block: Block) -> CallName:
        """Return the client's name of the called tool. The model may call one that was not offered."""
        known = self._job.call_names.get(block.name)
        return known if isinstance(known, CallName) else CallName(block.name)

    def _kind(self, block: Block) -> ToolKind:
        """Return the kind of a call's item: that of a function if it does not fit the tool's own."""
        kind = self._known(block).kind
        return kind if not kind.late or (block.complete and kind.fits(block.text)) else FUNCTION

    def _id(self, block: Block) -> str:
        prefix = self._kind(block).prefix if block.kind is Kind.CALL else _PREFIXES[block.kind]
        return f"{prefix}_{self._job.request_id}_{block.index}"

    # --- its events -----------------------------------------------------------------------------------------------
    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._events = self._events, self._events + 1
        return sse(name, dumps({"type": name, "sequence_number": number, **fields}))

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index}

    def _opened(self, block: Block) -> bytes:
        added = {"output_index": block.index, "item": self._item(block, "in_progress")}
        events = self._event("response.output_item.added", added)
        if block.kind is Kind.TEXT:
            part = {"content_index": 0, "part": _text_part("")}
            events += self._event("response.content_part.added", self._place(block) | part)
        return events

    def _complete_call(self, block: Block) -> bytes:
        """Return all events of a call at once."""
        return self._opened(block) + self._contents(block, self._grown(block, block.text)) + self._closed(block)

    def _closed(self, block: Block) -> bytes:
        done = {"output_index": block.index, "item": self._item(block, _status(block))}
        return self._contents(block, self._ended(block)) + self._event("response.output_item.done", done)

    def _contents(self, block: Block, events: Events) -> bytes:
        """Return events with the content of an item."""
        place = self._place(block)
        return b"".join(self._event(f"response.{name}", place | fields) for name, fields in events)

    def _grown(self, block: Block, text: str) -> Events:
        if block.kind is Kind.CALL:
            return self._kind(block).grown(text)
        delta = {"content_index": 0, "delta": text}
        if block.kind is Kind.REASONING:
            return [("reasoning_text.delta", delta)]
        return [("output_text.delta", delta | {"logprobs": []})]

    def _ended(self, block: Block) -> Events:
        if block.kind is Kind.CALL:
            return self._kind(block).ended(self._known(block), block.text)
        content = {"content_index": 0, "text": block.text}
        if block.kind is Kind.REASONING:
            return [("reasoning_text.done", content)]
        part = {"content_index": 0, "part": _text_part(block.text)}
        return [("output_text.done", content | {"logprobs": []}), ("content_part.done", part)]


def _status(block: Block) -> str:
    return "completed" if block.complete else "incomplete"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_fields(usage: Usage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return fields if usage.slo is None else fields | {"slo": usage.slo}
