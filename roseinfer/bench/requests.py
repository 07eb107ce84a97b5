"""Endpoint, fields and headers of a load's requests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roseinfer.bench.arrivals import PlannedRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Template of the requests of a load.

    `fields` and `overrides`, which win over all, go into every body, `extra_headers` into every header. `chat`: a
    prompt is the only user message. `id_prefix`: of x-request-id, "" for no id. `count_chunk_tokens`: ask for the
    number of tokens in each chunk. `texts`: store the answers' texts. `max_concurrency`: limit of requests in flight, 0
    = unlimited.
    """

    endpoint: str = COMPLETIONS
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    extra_headers: Mapping[str, str] = field(default_factory=dict)
    id_prefix: str = ""
    count_chunk_tokens: bool = False
    texts: bool = False
    max_concurrency: int = 0

    def body(self, model: str, planned: PlannedRequest, send_objectives: bool = True) -> bytes:
        """Encode a request. `send_objectives`: include its class's fields."""
        streamed = {"include_usage": True, **({"continuous_usage_stats": True} if self.count_chunk_tokens else {})}
        return json.dumps(
            {
                "model": model,
                **self._prompt(planned),
                **self.fields,
                "stream": True,
                "stream_options": streamed,
                **_response_format(planned.schema),
                **(planned.slo.body if planned.slo and send_objectives else {}),
                **self.overrides,
            }
        ).encode()

    def headers(self, api_key: str | None, planned: PlannedRequest, send_objectives: bool = True) -> dict[str, str]:
        own = dict(planned.slo.headers) if planned.slo and send_objectives else {}
        named = {"x-request-id": f"{self.id_prefix}{planned.number}"} if self.id_prefix else {}
        return {"Content-Type": "application/json", **authorization(api_key), **own, **self.extra_headers, **named}

    def _prompt(self, planned: PlannedRequest) -> dict[str, Any]:
        if self.chat:
            content = [{"type": "text", "text": planned.text}]
            return {"messages": [{"role": "user", "content": content}], "max_completion_tokens": planned.output_len}
        return {
            "prompt": planned.prompt_ids if planned.text is None else planned.text,
            "max_tokens": planned.output_len,
        }


def fixed_work(temperature: float | None = None) -> RequestTemplate:
    """Return a template for greedy requests of a fixed length, so that all servers do the same work."""
    return RequestTemplate(fields={"temperature": 0.0 if temperature is None else temperature, "ignore_eos": True})


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _response_format(schema: dict[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {}
    named = {"name": "load", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}
