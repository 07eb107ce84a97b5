"""Write the reference of the Python API in docs/reference/python.md: `python .ci/python_reference.py`.

It is made from the docstrings of the public names of `roseinfer`, so the two cannot differ.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import roseinfer  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "python.md"
BEGIN = "<!-- written by .ci/python_reference.py -->"
# The order of the page. Methods are those of `LLM` that have an own part.
NAMES = (
    "LLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Slo",
    "LoRARequest",
    "RequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "ScoreOutput",
    "Logprob",
    "RequestMetrics",
    "FinishReason",
    "SequenceChunk",
)
METHODS = ("generate", "chat", "stream", "embed", "score", "get_tokenizer", "get_default_sampling_params", "close")


def page(text: str) -> str:
    """Return the page with a new reference."""
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n\n{reference()}\n"


def reference() -> str:
    return "\n\n".join(part for name in NAMES for part in _class(getattr(roseinfer, name)))


def _class(kind: Any) -> Iterator[str]:
    yield f"### {kind.__name__}"
    about, arguments, errors = _parts(inspect.getdoc(kind) or "")
    if not (dataclasses.is_dataclass(kind) or issubclass(kind, Enum | dict)):
        yield _signature(kind.__name__, kind)
    yield about
    if issubclass(kind, Enum):
        yield ", ".join(f"`{member.value}`" for member in kind) + "."
    elif dataclasses.is_dataclass(kind):
        yield _table(_fields(kind, arguments))
    elif arguments:
        yield _table([(f"`{name}`", text) for name, text in arguments.items()])
    if errors:
        yield errors
    if kind is roseinfer.LLM:
        for name in METHODS:
            yield from _method(name, getattr(kind, name))


def _method(name: str, method: Any) -> Iterator[str]:
    about, arguments, errors = _parts(inspect.getdoc(method) or "")
    yield f"#### LLM.{name}"
    yield _signature(name, method)
    yield about
    if arguments:
        yield _table([(f"`{argument}`", text) for argument, text in arguments.items()])
    if errors:
        yield errors


def _parts(docstring: str) -> tuple[str, dict[str, str], str]:
    """Return the text of a docstring, its arguments, and what follows these."""
    about, _, rest = docstring.partition("Args:\n")
    arguments: dict[str, str] = {}
    after: list[str] = []
    for line in rest.splitlines():
        found = re.match(r"    (\w+): (.*)", line)
        if found:
            arguments[found[1]] = found[2]
        elif line.startswith("        "):
            arguments[next(reversed(arguments))] += f" {line.strip()}"
        else:
            after.append(line)
    return _joined(about), arguments, _joined("\n".join(after))


def _joined(text: str) -> str:
    """Return paragraphs, each in one line."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def _signature(name: str, function: Any) -> str:
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    signature = inspect.Signature(parameters)
    return f"```\n{name}{signature}\n```"


def _fields(kind: Any, arguments: dict[str, str]) -> list[tuple[str, str]]:
    """Return rows of a dataclass. Fields without a line in the docstring are explained by its text."""
    rows = []
    for each in dataclasses.fields(kind):
        given = each.default if each.default is not dataclasses.MISSING else None
        default = (
            "" if each.default is dataclasses.MISSING else f" = {str(given) if isinstance(given, Enum) else given!r}"
        )
        rows.append((f"`{each.name}{default}`", arguments.get(each.name, "")))
    if not arguments:
        return [(name, "") for name, _ in rows]
    return rows


def _table(rows: list[tuple[str, str]]) -> str:
    if not any(text for _, text in rows):
        return "Fields: " + ", ".join(name for name, _ in rows) + "."
    lines = [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
    return "\n".join(["| name | meaning |", "| --- | --- |", *lines])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
