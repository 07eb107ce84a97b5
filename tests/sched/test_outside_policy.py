"""A policy of another package, whose file is the example of docs/how-to/add-a-policy.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT, blocks

EXAMPLE = next(block.text for block in blocks() if block.page.endswith("add-a-policy.md"))


def install(folder: Path) -> None:
    """Write what pip installs of a package with the example as its only module and one entry point."""
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "lifo.py").write_text(EXAMPLE)
    about = folder / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[roseinfer.policies]\nlifo = my_package.lifo:LifoPolicy\n")


def test_an_entry_point_adds_a_policy(tmp_path: Path) -> None:
    install(tmp_path)
    load = ("--num-requests", "200", "--rates", "40", "--max-num-seqs", "8", "--json", "out.json")
    command = [sys.executable, "-m", "roseinfer.cli", "simulate", "--policies", "fifo,lifo", *load]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True)
    points = json.loads((tmp_path / "out.json").read_text())["points"]
    fifo, lifo = (point["best_effort"]["ttft_ms"] for point in points)
    assert lifo["p50"] < fifo["p50"] and lifo["p99"] > fifo["p99"], "the youngest start first"
