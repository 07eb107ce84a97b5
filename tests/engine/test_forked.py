"""Fork of a process with an `LLM`: calls in the child raise an error, and the parent's engine continues."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from tests.helpers.cases import cases

PATIENCE_S = 120.0
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
# Twice the KV cache: repeated prompts have been in host memory.
PROMPTS = [[start + 3] * 64 for start in range(8)]


def tokens(llm: LLM) -> list[list[int]]:
    return [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def what_a_child_gets(llm: LLM, stream: Any) -> list[str]:
    """Return the errors of all calls in the child."""
    tries = (
        lambda: llm.generate([PROMPTS[0]], GREEDY),
        lambda: list(llm.stream(PROMPTS[0], GREEDY)),
        lambda: next(stream),
        stream.close,
        llm.close,
        lambda: llm.generate([PROMPTS[0]], GREEDY),
    )
    said = []
    for attempt in tries:
        try:
            attempt()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return said


def main(record: str, ranks: str) -> None:
    """User program that forks in the middle of a stream. Both processes end as Python does."""
    options = {"num_kv_blocks": 24, "max_model_len": 96, "device": "cpu", "threads": 2, "kv_offloading_size": 0.01}
    llm = LLM("tiny", **options, record=record, tensor_parallel_size=int(ranks))
    offload = llm.engine.core.scheduler.offload
    assert offload is not None
    offload.cost = CostModel(
        CostParams(token_s=1.0), fit=False
    )  # it is loaded however slow a copy was on a busy machine
    first = tokens(llm)
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    begun = [token for chunk in (next(stream), next(stream)) for token in chunk.token_ids]
    reading, writing = os.pipe()
    if os.fork() == 0:
        signal.alarm(60)
        os.write(writing, json.dumps(what_a_child_gets(llm, stream)).encode())
        sys.exit(0)
    _, status = os.wait()
    os.close(writing)
    with os.fdopen(reading) as told:
        said = json.loads(told.read() or "null")
    rest = begun + [token for chunk in stream for token in chunk.token_ids]
    again, hits = tokens(llm), llm.engine.core.stats().offload.hits  # type: ignore[union-attr]
    llm.engine.core.scheduler.check_integrity()
    llm.close()
    print(json.dumps({"status": status, "said": said, "same": first == again, "rest": len(rest), "hits": hits}))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@cases("ranks", [2], exhaustive=[1])
def test_a_fork_gets_an_error_and_its_parent_continues(ranks: int, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "tests.engine.test_forked", str(record), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    came = json.loads(done.stdout)
    error = "EngineDeadError: this LLM belongs to the parent process; create one after the fork"
    assert came.pop("said") == [error] * 3 + ["", "", error]
    assert came.pop("hits") > 0, "or K and V in host memory played no part"
    assert came == {"status": 0, "same": True, "rest": 24}
    lines = record.read_text().splitlines()
    assert len(lines) == len(set(lines)) > 50, "the child has written none of them once more"


if __name__ == "__main__":
    main(*sys.argv[1:])
