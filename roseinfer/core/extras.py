"""Command that installs an optional dependency, as messages print it."""

import os
from pathlib import Path

# The folder that holds the package: of a clone, the one with pyproject.toml.
ROOT = Path(__file__).resolve().parents[2]


def install_command(extra: str, root: Path = ROOT) -> str:
    """Return the command that installs an extra: from the clone that this is, else by name."""
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'roseinfer[{extra}]'"
    clone = "." if Path.cwd().resolve() == root else os.fspath(root)
    return f"pip install -e '{clone}[{extra}]'"
