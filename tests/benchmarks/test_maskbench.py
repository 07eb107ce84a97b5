"""benchmarks/maskbench.py over our own schemas: correct counts with the library and with a server."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import maskbench
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_level


def case(schema: dict[str, Any], *tests: tuple[bool, Any]) -> dict[str, Any]:
    return {"schema": schema, "tests": [{"valid": valid, "data": data} for valid, data in tests]}


NUMBERS = {"type": "array", "items": {"type": "integer"}}
CASES = [
    case(NUMBERS, (True, [1, 22]), (True, []), (False, ["a"]), (False, {})),
    case(NUMBERS | {"uniqueItems": True}, (True, [1]), (False, [1, 1])),
    case({"type": "object", "properties": {"a": {}, "b": {}}}, (True, {"b": 1, "a": 2}), (True, {"a": 1, "b": 2})),
]


def test_what_is_counted() -> None:
    tokenizer = maskbench.tokenizer_in(None)
    strict, lenient = (maskbench.backend_of(kind, tokenizer) for kind in ("strict", "lenient"))
    found = [maskbench.outcome(strict, tokenizer, case) for case in CASES]
    assert [one.refused is None for one in found] == [True, False, True]
    assert maskbench.reason(found[1].refused or "") == "uniqueItems"
    assert [one.wrongly_accepted for one in found] == [0, 0, 0]
    assert [one.wrongly_rejected for one in found] == [0, 0, 1], "keys come in the order of the schema"
    assert len(found[0].masks_s) >= 8 and found[0].compile_s > 0
    ignored = maskbench.outcome(lenient, tokenizer, CASES[1])
    assert ignored.refused is None and ignored.wrongly_accepted == 1
    shown = maskbench.table({"strict": found, "lenient": [ignored]})
    assert "| schemas taken | 2 of 3 | 1 of 1 |" in shown and "| invalid documents accepted | 0 | 1 |" in shown
    assert "1  uniqueItems" in maskbench.refusals(found)


def test_a_schema_that_takes_too_long_is_given_up() -> None:
    worker = maskbench.Worker("strict", None, timeout_s=0.3)
    endless = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]}
    assert "too long" in (worker.ask(case(endless)).refused or "")
    assert worker.ask(CASES[0]).refused is None
    worker.close()


def test_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, one in enumerate([*CASES, case({"type": "no such type"})]):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    with LiveServer(byte_level()) as server:
        maskbench.against_server(server.url, maskbench.cases(tmp_path, 1))
    said = capsys.readouterr().out
    assert "first token later" in said and "3 schemas, 1 refused" in said
