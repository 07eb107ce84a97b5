"""Standard streams that are closed when a command starts."""

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """if True:
    import os, pathlib, sys
    pathlib.Path(sys.argv[1]).write_text(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""
PROGRAM = f"""if True:
    import subprocess, sys
    from roseinfer.cli.main import main

    try:
        main(["--version"])
    except SystemExit as end:
        assert not end.code
    print("written", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-c", {CHILD!r}, sys.argv[1]], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closed_streams_are_the_null_device_also_in_children(tmp_path: Path) -> None:
    out = tmp_path / "out"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", PROGRAM, str(out)]
    assert subprocess.run(closed, timeout=60).returncode == 0
    assert out.read_text().split() == ["/dev/null"] * 3
