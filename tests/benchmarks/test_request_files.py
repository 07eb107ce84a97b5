"""benchmarks/request_files.py: it answers a request, which stays within what a reader can hold in the head."""

import re
import subprocess
import sys

# Today's count, so that a request does not gain files unnoticed. Isolation took it from 69 to 75: text work runs in
# processes of its own, and hosts and sizes of bodies are checked before anything is parsed.
MOST_FILES = 75


def test_one_chat_request_runs_few_files() -> None:
    command = [sys.executable, "-m", "benchmarks.request_files", "--files"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    found = re.fullmatch(r"total files (\d+) functions (\d+) lines \d+", last)
    assert found is not None, last
    listed = [line for line in lines if line.startswith("    ")]
    assert len(listed) == int(found[1]) and int(found[2]) > int(found[1])
    assert any("server/request/inference.py" in line for line in listed), "the server is seen"
    assert any("sched/scheduler.py" in line for line in listed), "the engine's thread is seen"
    assert int(found[1]) <= MOST_FILES, "merge what is one concept, or spare the request a hop:\n" + "\n".join(lines)
