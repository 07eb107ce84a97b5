"""What the requests of a load carry beside their prompts: endpoint, fields and headers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roseinfer.bench.arrivals import Planned

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class RequestShape:
    """`fields` and `given` (which beats all) go into every body, `added` into every header.

    `chat`: prompts are the one message of a user. `id_prefix`: of x-request-id; none without. `counted`: ask for the
    number of tokens in each chunk. `texts`: keep what the answers say. `max_concurrency`: requests in flight at most, 0
    = any number.
    """

    endpoint: str = COMPLETIONS
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)
    id_prefix: str = ""
    counted: bool = False
    texts: bool = False
    max_concurrency: int = 0

    def body(self, model: str, planned: Planned, told: bool = True) -> bytes:
        """`told`: whether the server learns of the objectives."""
        streamed = {"include_usage": True, **({"continuous_usage_stats": True} if self.counted else {})}
        return json.dumps(
            {
                "model": model,
                **self._prompt(planned),
                **self.fields,
                "stream": True,
                "stream_options": streamed,
                **_response_format(planned.schema),
                **(planned.slo.body if planned.slo and told else {}),
                **self.given,
            }
        ).encode()

    def headers(self, api_key: str | None, planned: Planned, told: bool = True) -> dict[str, str]:
        own = dict(planned.slo.headers) if planned.slo and told else {}
        named = {"x-request-id": f"{self.id_prefix}{planned.number}"} if self.id_prefix else {}
        return {"Content-Type": "application/json", **authorization(api_key), **own, **self.added, **named}

    def _prompt(self, planned: Planned) -> dict[str, Any]:
        if self.chat:
            said = [{"type": "text", "text": planned.text}]
            return {"messages": [{"role": "user", "content": said}], "max_completion_tokens": planned.output_len}
        return {
            "prompt": planned.prompt_ids if planned.text is None else planned.text,
            "max_tokens": planned.output_len,
        }


def fixed_work(temperature: float | None = None) -> RequestShape:
    """Greedy and to the last token, so that all servers do the same work."""
    return RequestShape(fields={"temperature": 0.0 if temperature is None else temperature, "ignore_eos": True})


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _response_format(schema: dict[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {}
    named = {"name": "load", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}
