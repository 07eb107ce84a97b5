"""Two processes that share the embedded model generate the same as one."""

import contextlib
import gc
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from roseinfer import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from roseinfer.core.errors import EngineDeadError
from roseinfer.parallel import process_group
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from tests.helpers.cases import cases
from tests.helpers.drafters import every_draft_of
from tests.helpers.process_table import alive, children, command_line

# Room for few requests at once: some are preempted, and prompts leave the cache for the host's memory.
OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 20,
    "block_size": 8,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "kv_offloading_size": 0.05,
    "threads": 1,
    "device": "cpu",
    "overlap": True,
}
PROMPTS = [
    "def fibonacci(",
    "import os\n",
    "class Stack:\n",
    "def read(path):\n    ",
    "# " + "spam " * 24,
    "# " + "eggs " * 24,
]


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    with new_pair(speculation="auto") as (llm, _), llm:
        llm.engine.core.scheduler.drafting = None  # drafts prevent preemptions
        offload = llm.engine.core.scheduler.offload
        assert offload is not None
        offload.cost = CostModel(CostParams(token_s=1.0), fit=False)  # loads however slow a copy was
        yield llm


def rank_processes() -> set[int]:
    """Return the processes of other ranks that this process has launched."""
    return {child for child in children(os.getpid()) if "roseinfer.ranks.process" in command_line(child)}


@contextlib.contextmanager
def new_pair(**options: Any) -> Iterator[tuple[LLM, int]]:
    """Yield an engine of two ranks and the process of rank 1, which is gone at the end."""
    before = rank_processes()
    llm = LLM("tiny", tensor_parallel_size=2, **OPTIONS | options)
    (rank,) = rank_processes() - before
    made = [(llm, rank)]
    del llm  # a test may drop the engine
    yield made.pop()
    assert not alive(rank)


def tokens(done: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for answer in done for sample in answer.outputs]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(
            SamplingParams(n=2, max_tokens=16, temperature=0.0, ignore_eos=True), marks=pytest.mark.exhaustive
        ),
        SamplingParams(n=2, max_tokens=12, temperature=1.0, seed=3, top_p=0.9, repetition_penalty=1.1),
    ],
    ids=["greedy", "sampled"],
)
def test_tokens_equal_those_of_one_process(alone: LLM, pair: LLM, params: SamplingParams) -> None:
    """The second time prompts are in the prefix cache, or are loaded from host memory. Requests are preempted."""
    for _ in range(2):
        expected, got = (tokens(llm.generate(PROMPTS, params)) for llm in (alone, pair))
        assert got == expected and len(got) == 2 * len(PROMPTS)
    stats = pair.engine.core.stats()
    assert stats.preemptions and stats.offload is not None and stats.offload.loaded


def test_the_cache_is_as_large_as_that_of_one_process(alone: LLM, pair: LLM) -> None:
    """Blocks hold the same tokens, in two parts."""
    sizes = [
        (llm.engine.info.facts.num_blocks, llm.engine.info.facts.num_host_blocks, llm.engine.info.facts.block_bytes)
        for llm in (alone, pair)
    ]
    assert sizes[0] == sizes[1] and (alone.engine.info.ranks, pair.engine.info.ranks) == (1, 2)


def test_log_probabilities_equal_those_of_one_process(alone: LLM, pair: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1)
    one, two = (llm.generate(PROMPTS[3], params)[0] for llm in (alone, pair))
    assert one.prompt_logprobs and two.prompt_logprobs and one.outputs[0].logprobs and two.outputs[0].logprobs
    pairs = [*zip(one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True)]
    pairs += zip(one.outputs[0].logprobs, two.outputs[0].logprobs, strict=True)
    for a, b in pairs:
        assert a is not None and b is not None
        token = next(iter(a))
        assert token == next(iter(b)) and math.isclose(a[token].logprob, b[token].logprob, abs_tol=1e-4)


def test_guides_hold_on_all_ranks(alone: LLM, pair: LLM) -> None:
    number = StructuredOutputsParams(grammar='start: "{" /[0-9]{3}/ ": nothing else" /[.!]/')
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, structured_outputs=number)
    core = pair.engine.core
    drafting = core.scheduler.drafting = every_draft_of()  # of tokens that the guide forces
    drafting.constraints = core.guided
    one, two = (llm.generate(PROMPTS, params) for llm in (alone, pair))
    core.scheduler.drafting = None
    assert tokens(two) == tokens(one)
    texts = [answer.outputs[0].text for answer in two]
    assert all(text[1:4].isdigit() and text[4:-1] == ": nothing else" for text in texts)
    assert sum(drafting.counts["forced"].accepted) > len(PROMPTS)


def test_a_closed_stream_leaves_no_request(pair: LLM) -> None:
    stream = pair.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    stream.close()
    pair.engine.core.scheduler.check_integrity()
    assert pair.engine.core.scheduler.num_live == 0


@cases("overlap", [True], exhaustive=[False])
def test_an_engine_that_is_dropped_without_close_leaves_no_process(overlap: bool) -> None:
    with new_pair(overlap=overlap) as pair:
        llm, _ = pair
        assert len(llm.generate("def", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
        del llm, pair
        gc.collect()


def test_closing_does_not_wait_for_a_rank_that_is_stopped_in_the_middle_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "TIMEOUT_S", 3600.0)
    with new_pair() as (llm, rank):
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(rank, signal.SIGSTOP)
        llm.engine.core.launch()  # now rank 0 is in a step that the other rank has not begun
        llm.close()


def test_an_interrupt_ends_the_wait_for_a_rank_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "TIMEOUT_S", 3600.0)
    with new_pair(overlap=False) as (llm, rank):
        os.kill(rank, signal.SIGSTOP)
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may have left its own
        try:
            interrupt.start()
            with pytest.raises(KeyboardInterrupt), llm:
                llm.generate(PROMPTS[0])
        finally:
            signal.signal(signal.SIGINT, before)


def test_a_rank_that_dies_ends_running_requests() -> None:
    with new_pair() as (llm, rank):
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=120, ignore_eos=True))
        next(stream)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="the process of rank 1 ended with code -9"):
            list(stream)
        llm.close()


INTERRUPTED_SCRIPT = """
import os, signal, threading
from roseinfer import LLM
from tests.helpers.process_table import children, command_line

llm = LLM("tiny", device="cpu", tensor_parallel_size=2, num_kv_blocks=20, threads=1)
(rank,) = [child for child in children(os.getpid()) if "roseinfer.ranks.process" in command_line(child)]
print(rank, flush=True)
os.kill(rank, signal.SIGSTOP)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
llm.generate("x")
"""


def test_an_interrupted_script_ends_although_a_rank_is_stopped() -> None:
    """The script does not close its LLM, and a step is in flight."""
    command = [sys.executable, "-m", "tests.helpers.run_code", INTERRUPTED_SCRIPT]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = script.communicate(timeout=60)
    finally:
        script.kill()
        script.wait()
    assert errors.rstrip().endswith("KeyboardInterrupt") and not alive(int(output))
