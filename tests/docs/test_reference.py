"""Reference pages against the code: commands, fields, error codes, metrics."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from roseinfer.server.formats.schemas import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "roseinfer").rglob("*.py"))}


def test_the_page_of_commands_is_what_its_program_writes() -> None:
    written = runpy.run_path(str(ROOT / ".ci" / "cli_reference.py"))["page"]()
    assert (REFERENCE / "cli.md").read_text(encoding="utf-8") == written, "run: make pages"


def test_the_fields_of_completions_and_chats() -> None:
    named: dict[str, set[str]] = {"C": set(), "H": set()}
    for line in (REFERENCE / "api.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-1] in ("C", "H", "C H"):
            for api in cells[-1].split():
                named[api] |= set(re.findall(r"`([a-z_]+\*?)`", cells[0]))
    for api, model in (("C", CompletionRequest), ("H", ChatRequest)):
        fields = {field.alias or name for name, field in model.model_fields.items()}
        fields = {name if not name.startswith("guided_") else "guided_*" for name in fields}
        assert named[api] == fields, api


def test_the_codes_of_errors() -> None:
    """Every code that the source gives an error, in the server and below it."""
    assigned = re.compile(r'\bcode(?:=|: str = | = )"([a-z_]+)"')
    used = {code for text in SOURCES.values() for code in (*assigned.findall(text), *codes_by_position(text))}
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    missing = {code for code in used if f"`{code}`" not in text}
    assert missing == set()


def codes_by_position(source: str) -> Iterator[str]:
    """Return the literal codes that calls of these functions give as positional arguments."""
    place = {"unavailable": 0, "bad_request": 2, "InvalidRequestError": 2, "unsupported_error": 2, "Unsupported": 2}
    if not any(f"{name}(" in source for name in place):  # others take a second to parse
        return
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in place:
            for argument in call.args[place[call.func.id] :][:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def test_the_names_of_metrics() -> None:
    pattern = re.compile(r'"((?:vllm|roseinfer):[a-z_]+)"')
    used = {name for path, text in SOURCES.items() if "server" in path.parts for name in pattern.findall(text)}
    named = set(re.findall(r"`((?:vllm|roseinfer):[a-z_]+)`", (REFERENCE / "metrics.md").read_text(encoding="utf-8")))
    assert {name.removesuffix("_total") for name in used} - {name.removesuffix("_total") for name in named} == set()


def test_the_tables_of_gauges_and_counters() -> None:
    """Names of counters, and of nothing in the table of gauges, end in `_total`."""
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    gauges, counters = (page.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in ("Gauges", "Counters"))
    assert [name for name in _first_names(gauges) if name.endswith("_total")] == []
    assert [name for name in _first_names(counters) if not name.endswith("_total")] == []


def _first_names(table: str) -> Iterator[str]:
    for line in table.splitlines():
        yield from re.findall(r"`(\w+:\w+|http_\w+)`", line.removeprefix("|").partition("|")[0])
