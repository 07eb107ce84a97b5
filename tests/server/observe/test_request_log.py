"""Lines about requests, as text and as JSON."""

import json

from roseinfer.core.outputs import FinishReason
from roseinfer.server.observe.request_log import LogLine

FIELDS = {"request": 'a "b" 100%\n\u00e9\ud800', "finish": FinishReason.LENGTH, "choices": 2, "e2e_ms": 1.50049}


def test_text_is_pairs() -> None:
    line = LogLine("request ended", {"request": "r", "finish": FinishReason.STOP, "e2e_ms": 1.06, "why": "a b"})
    assert str(line) == "request=r finish=stop e2e_ms=1.1 why='a b'"


def test_json_has_whatever_clients_send() -> None:
    members = json.loads("{" + LogLine("request ended", FIELDS).json_members() + "}")
    assert members == {"message": "request ended", **FIELDS, "finish": "length", "e2e_ms": 1.5}
