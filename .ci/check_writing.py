"""Check the rules of CONTRIBUTING.md about wording that a program can check; list each violation and exit with 1.

Docstrings start with an imperative verb or a noun, no two public classes share a name, and numeric module constants
name their role or unit.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("roseinfer", "benchmarks", "tests", "training", "examples", ".ci")

# First words that leave a docstring without its subject: pronouns, prepositions and question words.
BARE_START = re.compile(
    "of|it|its|who|whom|whose|whoever|those|these|this|that|what|whatever|which|whichever|whether|how|where|why|"
    "when|while|as|so|and|but|or|from|by|with|without|until|unless|nobody|somebody|anybody|everybody|is|are|was|"
    "there|than|then"
)
# Third-person verbs: the imperative is meant.
THIRD_PERSON = re.compile(
    "returns|raises|runs|takes|makes|reads|writes|holds|tells|waits|counts|ends|sends|starts|stops|gives|gets|"
    "puts|adds|removes|drops|keeps|asks|answers|says|looks|calls|checks|builds|creates|parses|computes|yields|"
    "closes|opens|loads|stores|copies|serves|receives|accepts|refuses|rejects|decides|finds|follows|hears|passes|"
    "brings|sets|turns|marks"
)
# Nouns that look like verbs of the third person.
NOUN_START = re.compile(
    "answers|turns|marks|loads|stores|copies|sets|counts|ends|starts|stops|calls|checks|runs|looks|holds|waits"
)
CONSTANT = re.compile(
    r"_?(MIN|MAX|DEFAULT)_\w+|\w+_(S|MS|US|NS|BYTES|TOKENS|BLOCKS|STEPS|SHARE|COUNT|ROWS|BITS|CHARS|PORT|VERSION|EXIT|"
    "COLUMNS|ELEMENTS|PROGRAMS|WARPS|TILES|PARTS|FACTOR)"
)
# Numeric constants whose name says what they are without a unit.
CONSTANT_EXCEPTIONS = frozenset(
    {"CLIENT_CLOSED_REQUEST", "KIB", "MIB", "GIB", "KB", "MB", "GB", "INT32", "INF", "EPS", "PI", "LOG2_E"}
    | {"SCALE_BLOCK", "IN_BULK", "NOT_FINITE", "NOTHING_LEFT", "USER_ID", "OWNER", "NO_TOKEN"}
)
# Fields of a syntax tree that hold statements, or what holds statements.
STATEMENT_FIELDS = ("body", "orelse", "finalbody", "handlers", "cases")
# Constants of kernels and folders of tests follow the names of what they describe.
CONSTANTS_IN = ("roseinfer/",)


def main() -> int:
    problems: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    for path in _sources():
        tree = ast.parse(path.read_text())
        if path.parts[0] == "roseinfer":
            for name, line in public_classes(tree):
                classes[name].append(f"{path}:{line}")
        problems += [f"{path}:{line}: {text}" for line, text in docstring_starts(tree)]
        if str(path).startswith(CONSTANTS_IN):
            problems += [f"{path}:{line}: {text}" for line, text in _constants(tree)]
    for name, places in sorted(classes.items()):
        if len(places) > 1:
            problems.append(f"public class {name!r} is defined more than once: {', '.join(places)}")
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


def _sources() -> Iterator[Path]:
    for root in ROOTS:
        yield from sorted(Path(root).rglob("*.py"))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the module and all its statements; expressions, most of the nodes, define nothing."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in STATEMENT_FIELDS:
            waiting += getattr(node, name, ())


def public_classes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in _statements(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node.lineno


def docstring_starts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _statements(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        first = docstring.split(maxsplit=1)[0]
        word = first.strip("`*.,:;()").lower()
        if BARE_START.fullmatch(word) and not first.startswith("`"):
            yield node.body[0].lineno, f"a docstring starts with {first!r} (start with an imperative verb or a noun)"
        elif THIRD_PERSON.fullmatch(word) and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not NOUN_START.fullmatch(word)
        ):
            yield node.body[0].lineno, f"a docstring starts with {first!r} (use the imperative)"


def _constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        else:
            continue
        if value is None or not _is_number(value):
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper() and not _is_named(target.id):
                yield node.lineno, f"the numeric constant {target.id!r} names no unit or role (MIN_, MAX_, _S, ...)"


def _is_named(constant: str) -> bool:
    return CONSTANT.fullmatch(constant) is not None or constant.lstrip("_") in CONSTANT_EXCEPTIONS


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and _is_number(value.right)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


if __name__ == "__main__":
    sys.exit(main())
