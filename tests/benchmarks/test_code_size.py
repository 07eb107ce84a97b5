"""benchmarks/code_size.py: counts of a small tree."""

from pathlib import Path

import pytest

from benchmarks import code_size

FILES = {
    "roseinfer/__init__.py": '"""It is a package."""\n',
    "roseinfer/core/__init__.py": "",
    "roseinfer/core/first.py": (
        '"""First module."""\n\n\nclass Item:\n    """An item."""\n\n\nclass _Hidden:\n    pass\n'
    ),
    "roseinfer/core/second.py": (
        "from typing import TYPE_CHECKING\n\nfrom roseinfer.core import first\n\n"
        "if TYPE_CHECKING:\n    from roseinfer.core import third\n\n\n"
        'class Item:\n    def run(self):\n        """Returns one."""\n\n        # why\n        return self.one()\n\n'
        "    def one(self):\n        return [n for n in (1,)]\n"
    ),
    "roseinfer/core/third.py": "from roseinfer.core.second import Item\n",
    "benchmarks/one.py": "x = 1\n\ny = 2\n",
    "tests/test_one.py": (
        "def test(monkeypatch, thing, self):\n"
        "    thing._replace(x=1), self._x, thing.__class__, thing.inner._y\n"
        '    monkeypatch.setattr(thing, "_z", 1)\n'
        '    monkeypatch.setattr("roseinfer.core.first._w", 1)\n'
        '    monkeypatch.setattr(thing, "z", 1)\n'
    ),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_rows(tree: Path) -> None:
    found = code_size.measure(tree, request=False)
    assert found == {
        "lines, roseinfer/.": 1,
        "lines, roseinfer/core": 17,
        "lines, roseinfer/": 18,
        "lines, benchmarks/": 2,
        "lines, tests/": 5,
        "public classes": 2,
        "public class names used twice or more": 1,
        "docstring starts that break the rule": 2,
        "files, core/": 4,
        "longest import chain, core/": 3,
        "private reads, tests/": 3,
    }


def test_a_cycle_counts_all_its_modules(tree: Path) -> None:
    (tree / "roseinfer/core/first.py").write_text("import roseinfer.core.second\n")
    assert code_size.import_chain(tree / "roseinfer/core", tree) == 3


def test_function_lines(tree: Path) -> None:
    run, one, comprehension = "10:Item.run", "16:Item.one", "17:Item.one.<locals>.<listcomp>"
    for functions, lines in (({run}, 2), ({run, one, comprehension}, 4), (set(), 0)):
        assert code_size.function_lines(tree / "roseinfer", {"core/second.py": functions}) == {"core": lines}


def test_command(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["code_size.py", "--repo", str(tree), "--against", str(tree), "--no-request"])
    code_size.main()
    assert "| files, core/ | 4 |" in capsys.readouterr().out
