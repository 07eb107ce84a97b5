"""Print a table of the state of the code of a checkout, beside another one if wanted.

    python -m benchmarks.code_size [--repo DIR] [--against DIR] [--no-request]

`--repo` is this checkout by default. `--against` adds a column of a second checkout, for example an older commit in a
worktree; both are counted by the same rules. Lines are non-blank lines of Python files.

* Lines: by package of roseinfer/, in all of it, in benchmarks/ and in tests/.
* Public classes: classes of roseinfer/ without a leading underscore, nested ones too.
* Docstring starts: docstrings that .ci/check_writing.py of this checkout objects to, in every folder it reads.
* Import chain: the longest path of imports among the modules of a folder and its subfolders, counted in modules.
  Modules that import each other count as one step of as many modules. Imports for types only do not count.
* Private reads: attributes `x._name` in tests/, where x is not `self` or `cls`, and names with an underscore that
  `monkeypatch.setattr` replaces.
* One chat request: what `benchmarks.request_files` of the checkout finds. Function lines are the lines of all functions
  that run, without docstrings and comments; an outer function includes its nested ones. `--no-request` leaves these
  rows out.
"""

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "roseinfer"
# Methods of named tuples, which are public in spite of their underscore.
PUBLIC_IN_SPITE = frozenset({"_replace", "_asdict", "_fields", "_request_id"})
REQUEST_TIMEOUT_S = 180.0

# File in the package -> "first line:qualified name" of functions in it.
Functions = Mapping[str, set[str]]


def count_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip())


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def size(folder: Path) -> int:
    return sum(count_lines(path.read_text()) for path in sources(folder))


def package_of(path: str) -> str:
    """Return the first folder of a file's path in the package, "." for files of its root."""
    return path.split("/")[0] if "/" in path else "."


def lines_by_package(repo: Path) -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in sources(repo / PACKAGE):
        found[package_of(str(path.relative_to(repo / PACKAGE)))] += count_lines(path.read_text())
    return dict(found)


@cache
def writing_rules() -> ModuleType:
    """Return .ci/check_writing.py as a module."""
    spec = importlib.util.spec_from_file_location("check_writing", ROOT / ".ci" / "check_writing.py")
    assert spec is not None and spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    return rules


def class_names(repo: Path) -> Counter[str]:
    """Count how often each public class name is defined in the package."""
    trees = (ast.parse(path.read_text()) for path in sources(repo / PACKAGE))
    return Counter(name for tree in trees for name, _ in writing_rules().public_classes(tree))


def bad_docstrings(repo: Path) -> int:
    rules = writing_rules()
    paths = (path for root in rules.ROOTS for path in sources(repo / root))
    return sum(1 for path in paths for _ in rules.docstring_starts(ast.parse(path.read_text())))


def import_chain(folder: Path, repo: Path) -> int:
    """Return the number of modules on the longest path of imports among the modules of `folder`."""
    modules = {_module_name(path.relative_to(repo)): path for path in sources(folder)}
    imports = {name: set(_imported(path, name, modules)) - {name} for name, path in modules.items()}
    groups = _components(imports)
    longest: dict[frozenset[str], int] = {}
    for group in dict.fromkeys(groups.values()):  # in order of import: what a group imports comes before it
        below = {groups[other] for name in group for other in imports[name]} - {group}
        longest[group] = len(group) + max((longest[other] for other in below), default=0)
    return max(longest.values(), default=0)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, name: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of `modules` that a file imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in modules:
                    yield whole
                elif base in modules:
                    yield base


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those below `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _runtime_nodes(child)


def _components(imports: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    """Return each module's group of modules that import each other (Tarjan), imported groups first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: dict[str, frozenset[str]] = {}

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other not in found:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = frozenset(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            found.update(dict.fromkeys(group, group))

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def private_reads(folder: Path) -> int:
    """Count reads and replacements of other objects' private fields."""
    trees = (ast.parse(path.read_text()) for path in sources(folder))
    return sum(_is_private_read(node) for tree in trees for node in ast.walk(tree))


def _is_private_read(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return _is_private(node.attr) and owner not in ("self", "cls")
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("monkeypatch.setattr")):
        return False
    names = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return any(_is_private(name.rpartition(".")[2]) for name in names)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_IN_SPITE


def function_lines(package: Path, functions: Functions) -> dict[str, int]:
    """Return the lines of code of functions by package, without docstrings, comments and blank lines."""
    found: Counter[str] = Counter()
    for path, names in functions.items():
        text = (package / path).read_text()
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        # A code object starts at its first decorator. Comprehensions and lambdas are lines of their function.
        starts = {min(each.lineno for each in (node, *node.decorator_list)): node for node in nodes}
        run: set[int] = set()
        for name in names:
            if (node := starts.get(int(name.partition(":")[0]))) is not None:
                run.update(_line_numbers(node))
        for node in nodes:
            if ast.get_docstring(node) is not None:
                run.difference_update(_line_numbers(node.body[0]))
        lines = text.splitlines()
        code = [
            number for number in run if lines[number - 1].strip() and not lines[number - 1].lstrip().startswith("#")
        ]
        found[package_of(path)] += len(code)
    return dict(found)


def _line_numbers(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def request_functions(repo: Path) -> dict[str, set[str]]:
    """Return the functions that one chat request runs, by the checkout's own program."""
    command = [sys.executable, "-m", "benchmarks.request_files", "--functions"]
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=REQUEST_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"benchmarks.request_files failed in {str(repo)!r}:\n{done.stderr[-2000:]}")
    found: dict[str, set[str]] = defaultdict(set)
    path = ""
    for line in done.stdout.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 4:
            path = line.split()[0]
        elif indent == 8:
            found[path].add(line.strip())
    return found


def measure(repo: Path, request: bool) -> dict[str, int]:
    """Return the rows of the table: name -> value."""
    package = repo / PACKAGE
    by_package = lines_by_package(repo)
    rows = {f"lines, {PACKAGE}/{name}": lines for name, lines in sorted(by_package.items())}
    rows[f"lines, {PACKAGE}/"] = sum(by_package.values())
    rows |= {f"lines, {name}/": size(repo / name) for name in ("benchmarks", "tests")}
    names = class_names(repo)
    rows["public classes"] = names.total()
    rows["public class names used twice or more"] = sum(count > 1 for count in names.values())
    rows["docstring starts that break the rule"] = bad_docstrings(repo)
    folders = sorted(path.parent for path in package.glob("*/__init__.py"))
    rows |= {f"files, {folder.name}/": len(sources(folder)) for folder in folders}
    rows |= {f"longest import chain, {folder.name}/": import_chain(folder, repo) for folder in folders}
    rows["private reads, tests/"] = private_reads(repo / "tests")
    if request:
        functions = request_functions(repo)
        lines = function_lines(package, functions)
        rows["files that one chat request runs"] = len(functions)
        rows["functions that one chat request runs"] = sum(map(len, functions.values()))
        rows["function lines of one chat request"] = sum(lines.values())
        rows |= {f"function lines of one chat request, {name}": count for name, count in sorted(lines.items())}
    return rows


def table(columns: Mapping[str, Mapping[str, int]]) -> str:
    """Return Markdown: a row for each name in any column, "-" where a column lacks it."""
    names = dict.fromkeys(name for rows in reversed(list(columns.values())) for name in rows)
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name in _in_groups(names):
        cells = (f"{rows[name]:,}" if name in rows else "-" for rows in columns.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _in_groups(names: Mapping[str, None]) -> list[str]:
    """Put rows that only a later column has next to those of their kind."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(name.partition(",")[0] for name in names))}
    return sorted(names, key=lambda name: kinds[name.partition(",")[0]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repo", type=Path, default=ROOT, metavar="DIR", help="checkout to measure (default: this one)"
    )
    parser.add_argument("--against", type=Path, metavar="DIR", help="second checkout, shown in a column of its own")
    parser.add_argument("--no-request", action="store_true", help="do not run a chat request")
    args = parser.parse_args()
    columns: dict[str, dict[str, int]] = {}
    for repo in filter(None, (args.against, args.repo)):
        columns[str(repo)] = measure(repo.resolve(), not args.no_request)
    print(table(columns))


if __name__ == "__main__":
    main()
