"""benchmarks/request_files.py: it answers a request, which stays within what a reader can hold in the head."""

import re
import subprocess
import sys

# Requests live apart from the ways to engines, as they may go from one to another; times on the way there are ages.
# What becomes of each is kept beside what is counted.
# Where requests are, how they start and what they have waited for is apart from the scheduler, which would be four
# concepts otherwise.
# Which kinds of decisions follow which protocol is asked once for each kind, where the protocols are.
# What a step costs, who learns it, how fast the machine is just now and its clock are four concepts as well.
MOST_FILES = 69


def test_one_chat_request_runs_few_files() -> None:
    command = [sys.executable, "-m", "benchmarks.request_files", "--files"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    found = re.fullmatch(r"total files (\d+) functions (\d+)", last)
    assert found is not None, last
    listed = [line for line in lines if line.startswith("    ")]
    assert len(listed) == int(found[1]) and int(found[2]) > int(found[1])
    assert any("server/request/inference.py" in line for line in listed), "the server is seen"
    assert any("sched/scheduler.py" in line for line in listed), "the engine's thread is seen"
    assert int(found[1]) <= MOST_FILES, "merge what is one concept, or spare the request a hop:\n" + "\n".join(lines)
