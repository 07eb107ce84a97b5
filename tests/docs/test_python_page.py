"""docs/reference/python.md: its reference is that of the docstrings. `test_commands.py` runs its examples."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from roseinfer import LLM
from tests.test_public_face import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "python.md"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / ".ci"), *sys.path])
    import python_reference

    return python_reference


def test_the_reference_is_up_to_date(writer: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert writer.page(text) == text, "run: python .ci/python_reference.py"


def test_every_public_name_and_method_is_on_the_page(writer: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^#{3,4} (\S+)$", text, re.MULTILINE)
    methods = {name for name, _ in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")}
    assert sorted(headings) == sorted([*PUBLIC, *(f"LLM.{name}" for name in methods)])
    assert "|  |" not in text, "every argument is explained"
