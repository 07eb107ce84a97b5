"""The corpus: the standard library of the running interpreter, cut into documents.

A document is a module head (docstring, imports, first constants), a top-level function, a class, or, where a
class is too long, the class with its first methods and each further method by itself. Documents are dedented
and unique. A hash of its name assigns a module to a split, so a split never depends on the order of files and
a module never lends text to two splits.
"""

import ast
import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_CLASS_BYTES = 5000
MAX_HEAD_BYTES = 3000
MAX_SCRIPT_BYTES = 5000
MAX_DOCUMENT_BYTES = 20000
MAX_LINE_CHARS = 300
MIN_SHARED_CHARS = 100
SPLIT_BUCKETS = 32
SKIPPED_TOP_LEVEL = frozenset({"site-packages", "dist-packages", "pydoc_data"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Module:
    """One source file that parses. `name` is its dotted name below the library's folder."""

    name: str
    source: str
    tree: ast.Module

    @property
    def is_test(self) -> bool:
        parts = self.name.split(".")
        return "test" in parts or "tests" in parts or "idle_test" in parts


@dataclass(frozen=True)
class Corpus:
    """Documents by split, in source order. `scripts` repeats training text (see `script`)."""

    train: list[str]
    scripts: list[str]
    valid: list[str]
    heldout_library: list[str]
    heldout_tests: list[str]
    heldout_modules: list[str]
    train_modules: list[Module]


def split_of(module_name: str) -> str:
    """'heldout', 'valid' or 'train' (about 1/32, 1/32 and 30/32), from the SHA-256 of the module's name."""
    bucket = int.from_bytes(hashlib.sha256(module_name.encode()).digest()[:4], "big") % SPLIT_BUCKETS
    return {0: "heldout", 1: "valid"}.get(bucket, "train")


def read_modules() -> Iterator[Module]:
    """Every module of the standard library that this interpreter can parse, in order of path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in SKIPPED_TOP_LEVEL or relative.parts[0].startswith("_sysconfigdata"):
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # files that test the parser's own errors, or that are written in Python 2
        yield Module(".".join(relative.with_suffix("").parts), source, tree)


def first_line(node: ast.stmt) -> int:
    """The first line of a statement, counted from 1, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def cut(lines: list[str], first: int, last: int) -> str:
    """Lines `first` to `last`, counted from 1 and both included, ended by one newline.

    The first line's indentation is taken off every line that has it: text in a string may be indented less.
    """
    chosen = lines[first - 1 : last]
    indent = chosen[0][: len(chosen[0]) - len(chosen[0].lstrip(" "))]
    return "\n".join(line.removeprefix(indent).rstrip() for line in chosen).strip("\n") + "\n"


def leading(lines: list[str], nodes: list[ast.stmt], first: int, limit: int) -> str:
    """Return whole statements from line `first` on that fit in `limit` bytes ('' if none does)."""
    text = ""
    for node in nodes:
        longer = cut(lines, first, node.end_lineno or node.lineno)
        if len(longer.encode()) > limit:
            break
        text = longer
    return text


def head(module: Module, lines: list[str]) -> str:
    """Docstring, imports and constants before the first definition."""
    nodes = []
    for node in module.tree.body:
        if isinstance(node, DEFINITIONS):
            break
        nodes.append(node)
    return leading(lines, nodes, first_line(nodes[0]), MAX_HEAD_BYTES) if nodes else ""


def class_documents(lines: list[str], node: ast.ClassDef) -> Iterator[str]:
    """The class; or, if it is long, what of it fits and then its other methods one by one."""
    whole = cut(lines, first_line(node), node.end_lineno or node.lineno)
    if len(whole.encode()) <= MAX_CLASS_BYTES:
        yield whole
        return
    start = leading(lines, node.body, first_line(node), MAX_CLASS_BYTES)
    if start:
        yield start
    end = first_line(node) + start.count("\n") - 1
    for child in node.body:
        if isinstance(child, DEFINITIONS) and first_line(child) > end:
            yield from definition_documents(lines, child)


def definition_documents(lines: list[str], node: Definition) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield from class_documents(lines, node)
    else:
        yield cut(lines, first_line(node), node.end_lineno or node.lineno)


def is_text(document: str) -> bool:
    """False for data written as code: very long lines, or documents that are mostly one table."""
    longest = max(map(len, document.splitlines()), default=0)
    return 20 <= len(document.encode()) <= MAX_DOCUMENT_BYTES and longest <= MAX_LINE_CHARS


def documents(module: Module) -> Iterator[str]:
    """All documents of a module in source order."""
    lines = module.source.expandtabs(8).split("\n")
    yield from filter(is_text, [head(module, lines)])
    for node in module.tree.body:
        if isinstance(node, DEFINITIONS):
            yield from filter(is_text, definition_documents(lines, node))


def script(module: Module) -> str:
    """The module from its first import on, as far as whole statements fit: what may follow `import os`."""
    nodes = module.tree.body
    start = next((i for i, n in enumerate(nodes) if isinstance(n, ast.Import | ast.ImportFrom)), None)
    if start is None:
        return ""
    lines = module.source.expandtabs(8).split("\n")
    return leading(lines, nodes[start:], first_line(nodes[start]), MAX_SCRIPT_BYTES)


def build() -> Corpus:
    """Read and split the corpus. Text that a held-out or validation document has is dropped from training."""
    modules = list(read_modules())
    by_split: dict[str, list[Module]] = {"heldout": [], "valid": [], "train": []}
    for module in modules:
        by_split[split_of(module.name)].append(module)
    seen: set[str] = set()

    def fresh(chosen: list[Module]) -> list[str]:
        unique = []
        for document in (d for module in chosen for d in documents(module)):
            if document not in seen:
                seen.add(document)
                unique.append(document)
        return unique

    heldout = by_split["heldout"]
    library = fresh([m for m in heldout if not m.is_test])
    tests = fresh([m for m in heldout if m.is_test])
    valid = fresh(by_split["valid"])
    train = fresh(by_split["train"])
    kept_out = [d for d in library + tests + valid if len(d) >= MIN_SHARED_CHARS]
    candidates = [s for m in by_split["train"] if not m.is_test and is_text(s := script(m))]
    scripts = [s for s in candidates if not any(d in s for d in kept_out)]
    return Corpus(train, scripts, valid, library, tests, [m.name for m in heldout], by_split["train"])
