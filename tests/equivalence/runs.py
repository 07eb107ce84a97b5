"""One set of prompts through an engine, run in every way that must not change its output."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.build import build_engine
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.options import make_engine_config
from tests.equivalence.models import VOCAB

CUDA = torch.cuda.is_available()
LISTED = 4

# Together with what `start` adds: launched kernel by kernel, one step in flight, prompts as a whole, nothing cached.
PLAIN = {"enforce_eager": True, "overlap": False, "enable_chunked_prefill": False, "enable_prefix_caching": False}
CHUNKS = {"enable_chunked_prefill": True, "long_prefill_token_threshold": 23}
FEW_BLOCKS = {"num_kv_blocks": 18}
SETTINGS = {
    "plain": {},
    "graphs": {"enforce_eager": False},
    "depth 2": {"enforce_eager": False, "overlap": True},
    "chunks": CHUNKS,
    "prefix hit": {"enable_prefix_caching": True},
    "preempted": FEW_BLOCKS,
    "torch": {"attention_backend": "torch"},
    "all at once": {"enforce_eager": False, "overlap": True, "enable_prefix_caching": True, **CHUNKS, **FEW_BLOCKS},
}


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


HEAD = ids(70, 0)
PROMPTS = {
    "one": [42],
    "short": ids(17, 1),
    "block": ids(32, 2),
    "head": HEAD,
    "branch": [*HEAD[:50], *ids(21, 3)],
    "longer": [*HEAD, *ids(43, 4)],
    "long": ids(181, 5),
    "again": HEAD,
}
# Outputs end at different steps, so that batches of every size decode.
LENGTHS = {name: (4 if CUDA else 2) * (4 + number) for number, name in enumerate(PROMPTS)}
Run = dict[str, list[TokenLogprobs]]


def start(path: Path, device: str, dtype: str, *, ranks_on_one_gpu: bool = False, **options: object) -> EngineCore:
    shape = {"block_size": 16, "num_kv_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    more = {"device": device, "dtype": dtype, "threads": 4 if CUDA else 1, "scheduling_policy": "fifo"}
    options = {**shape, **more, **PLAIN, "max_model_len": 256, **options}
    config = replace(make_engine_config(model=str(path), **options), ranks_on_one_gpu=ranks_on_one_gpu)
    return build_engine(config, path)[0]


def run(core: EngineCore) -> Run:
    """Return every prompt's output, and all positions of one prompt."""
    for name, prompt in PROMPTS.items():
        params = SequenceParams(max_tokens=LENGTHS[name], temperature=0.0, ignore_eos=True, logprobs=LISTED)
        core.add(Add(name, Prompt(prompt, params)))
    scored = SequenceParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=LISTED, prompt_logprobs=LISTED)
    found: Run = {}
    drain(core, found)
    core.add(Add("scored", Prompt(PROMPTS["long"], scored)))
    drain(core, found)
    return found


class Runs:
    """Checkpoint with the results of its runs so far; by default in float32 on a CPU."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[tuple[str, ...], Run] = {}

    def run(self, setting: str, device: str = "cpu", dtype: str = "float32", **options: Any) -> Run:
        """Return the second of two rounds if there is a prefix cache, which it finds warm."""
        key = (setting, device, dtype, repr(options))
        if key not in self._runs:
            core = start(self._path, device, dtype, **{**SETTINGS[setting], **options})
            rounds = 2 if "enable_prefix_caching" in SETTINGS[setting] else 1
            self._runs[key] = [run(core) for _ in range(rounds)][-1]
            check_what_happened(core, setting)
            core.close()
        return self._runs[key]


def drain(core: EngineCore, found: Run) -> None:
    while core.busy:
        for output in core.step():
            assert output.end is None or output.end.error is None, output
            found.setdefault(output.request_id, []).extend(output.logprobs or ())
            if output.prompt_logprobs:
                entries = [entry for entry in output.prompt_logprobs if entry is not None]
                found.setdefault(f"prompt of {output.request_id}", []).extend(entries)


def check_what_happened(core: EngineCore, setting: str) -> None:
    stats = core.stats()
    assert (stats.prefix_hits > 0) == ("enable_prefix_caching" in SETTINGS[setting])
    assert (stats.preemptions > 0) == ("num_kv_blocks" in SETTINGS[setting])
