"""Loads scripts of benchmarks/ as modules; they find each other as they do when run from there."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def scripts(*names: str) -> Iterator[list[ModuleType]]:
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == FOLDER:
                del sys.modules[name]
