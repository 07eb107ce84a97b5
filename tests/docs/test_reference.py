"""Reference pages against the code: commands, fields, error codes, metrics."""

import re
import runpy
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
    pattern = re.compile(r'\bcode(?:=|: str = | = )"([a-z_]+)"|bad_request\([^()]*?, "[a-z_.]+", "([a-z_]+)"\)')
    used = {one or other for text in SOURCES.values() for one, other in pattern.findall(text)}
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    missing = {code for code in used if f"`{code}`" not in text}
    assert missing == set()


def test_the_names_of_metrics() -> None:
    pattern = re.compile(r'"((?:vllm|roseinfer):[a-z_]+)"')
    used = {name for path, text in SOURCES.items() if "server" in path.parts for name in pattern.findall(text)}
    named = set(re.findall(r"`((?:vllm|roseinfer):[a-z_]+)`", (REFERENCE / "metrics.md").read_text(encoding="utf-8")))
    assert {name.removesuffix("_total") for name in used} - {name.removesuffix("_total") for name in named} == set()
