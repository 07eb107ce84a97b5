"""Results of `experts_cuts` in its folder: a line of RESULTS for each, and in TRYING what is being measured."""

import json
from pathlib import Path
from typing import Any

RESULTS, TRYING = "results.jsonl", "trying.json"
# How the process that measures ends if it is to be started anew.
CRASHED, HUNG = 86, 87

Line = dict[str, Any]


def read_results(folder: Path) -> list[Line]:
    file = folder / RESULTS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add_result(folder: Path, line: Line) -> None:
    with (folder / RESULTS).open("a") as file:
        file.write(json.dumps(line) + "\n")
