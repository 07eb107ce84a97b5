"""benchmarks/tool_parsers.py: it runs, and measures every format on its own calls."""

import re
import subprocess
import sys

from roseinfer.text.tools.registry import format_names


def test_it_measures_every_format() -> None:
    command = [sys.executable, "-m", "benchmarks.tool_parsers", "--rounds", "1", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in format_names():
        assert re.search(rf"^call, {name} +{name} +\d", done.stdout, re.MULTILINE), name
    assert re.search(r"median -?\d+\.\d\d us, most", done.stdout.splitlines()[-1])
