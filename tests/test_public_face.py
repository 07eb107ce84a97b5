"""Public names of `import roseinfer`, which loads nothing before it is used."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import roseinfer
from tests.test_imports import PACKAGE

PUBLIC = [
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "LLM",
    "LoRARequest",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "SequenceChunk",
    "Slo",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def run_python(code: str, *flags: str) -> str:
    """Return the output of `code` in a fresh interpreter that finds the package without PYTHONPATH."""
    code = f"import sys\nsys.path.insert(0, {str(PACKAGE.parent)!r})\n{code}"
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_those_of_their_modules(name: str) -> None:
    value = getattr(roseinfer, name)
    assert value is getattr(import_module(value.__module__), name)
    assert name in roseinfer.__all__ and name in dir(roseinfer)


def test_nothing_else_is_public() -> None:
    assert sorted(roseinfer.__all__) == sorted([*PUBLIC, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        roseinfer.Engine  # noqa: B018
    with pytest.raises(ImportError):
        from roseinfer import Engine  # noqa: F401


def test_type_checkers_see_every_public_name() -> None:
    """Type checkers do not run `__getattr__`: the file must import each name from where it is found at run time."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    for name in PUBLIC:
        assert getattr(roseinfer, name).__module__ == seen[name]


def test_importing_the_package_loads_no_library() -> None:
    """-S: no installed package can be imported."""
    code = """
import roseinfer
assert not [name for name in sys.modules if name.startswith("roseinfer.")], "nothing of ours either"
from roseinfer import FinishReason, SamplingParams, Slo
print(SamplingParams(max_tokens=3).max_tokens, roseinfer.__version__)
"""
    assert run_python(code, "-I", "-S").split() == ["3", roseinfer.__version__]


def test_neither_the_package_nor_llm_loads_torch() -> None:
    code = """
import roseinfer
from roseinfer import *
print(LLM.__name__, "torch" in sys.modules)
"""
    assert run_python(code, "-I").split() == ["LLM", "False"]


def test_the_version_has_one_home() -> None:
    project = tomllib.loads((Path(PACKAGE).parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "roseinfer.__version__"}
