"""Whole models in bfloat16, on a GPU where there is one: every way of running them, against each other and float32.

The rule is that of `near_ties`. The reference is this engine on a CPU, in float32, with the same weights, which
`test_transformers` compares with transformers.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.llm import make_engine_config
from roseinfer.engine.messages import Add
from roseinfer.engine.process import build_engine
from tests.equivalence.models import SHAPES, SMALL_SHAPES, VOCAB, save_model
from tests.equivalence.near_ties import Compared, DifferentError, compare

CUDA = torch.cuda.is_available()
MODELS = SHAPES if CUDA else SMALL_SHAPES
# Of log probabilities, where logits have a standard deviation of about 1 and are themselves rounded to 1/64 beyond 2.
TOLERANCE = 0.12
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
ON_CUDA = ("graphs", "torch")  # elsewhere these are the plain setting
NAMES = [name for name in SETTINGS if CUDA or name not in ON_CUDA]
PAIRS = [("depth 2", "graphs" if CUDA else "plain"), *((name, "plain") for name in NAMES if name != "plain")]


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
# Ends are spread, so that steps of every size decode.
LENGTHS = {name: 16 + 4 * number for number, name in enumerate(PROMPTS)}
Run = dict[str, list[TokenLogprobs]]


class Model:
    """A checkpoint, and what came of the runs so far."""

    def __init__(self, family: str, folder: Path) -> None:
        self._family, self._folder = family, folder
        self.path = save_model(family, MODELS[family], folder / "right")
        self._runs: dict[str, Run] = {}

    @property
    def reference(self) -> Run:
        if "reference" not in self._runs:
            core = start(self.path, "cpu", "float32")
            self._runs["reference"] = run(core)
            core.close()
        return self._runs["reference"]

    def run(self, setting: str) -> Run:
        """The second of two rounds, which meets a warm prefix cache if there is one."""
        if setting not in self._runs:
            core = start(self.path, "cuda" if CUDA else "cpu", "bfloat16", **SETTINGS[setting])
            rounds = [run(core) for _ in range(2)]
            check_what_happened(core, setting)
            core.close()
            self._runs[setting] = rounds[1]
        return self._runs[setting]

    def wrong(self, attention_gain: float) -> Run:
        path = save_model(self._family, MODELS[self._family], self._folder / "wrong", attention_gain)
        core = start(path, "cuda" if CUDA else "cpu", "bfloat16")
        found = run(core)
        core.close()
        return found


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield Model(request.param, tmp_path_factory.mktemp(request.param))
    if CUDA:
        torch.cuda.empty_cache()


def start(path: Path, device: str, dtype: str, **options: object) -> EngineCore:
    shape = {"block_size": 16, "num_kv_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    more = {"device": device, "dtype": dtype, "threads": 4 if CUDA else 1, "scheduling_policy": "fifo"}
    options = {**shape, **more, **PLAIN, "max_model_len": 256, **options}
    return build_engine(make_engine_config(model=str(path), **options), path)[0]


def run(core: EngineCore) -> Run:
    """Every prompt's output, and of one prompt each position."""
    for name, prompt in PROMPTS.items():
        params = SamplingParams(max_tokens=LENGTHS[name], temperature=0.0, ignore_eos=True, logprobs=LISTED)
        core.add(Add(name, prompt, params))
    scored = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=LISTED, prompt_logprobs=LISTED)
    found: Run = {}
    drain(core, found)
    core.add(Add("scored", PROMPTS["long"], scored))
    drain(core, found)
    return found


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


def check(ours: Run, theirs: Run) -> Compared:
    """Also that enough was compared, and that logits are of the size which the tolerance is meant for."""
    seen = compare(ours, theirs, TOLERANCE)
    assert seen.tokens > len(PROMPTS["long"]) + sum(LENGTHS.values()) // 4
    assert -6 < sum(entry.logprob for entry in ours["short:0"]) / LENGTHS["short"] < -1
    print(seen)
    return seen


@pytest.mark.parametrize("setting", NAMES)
def test_bfloat16_is_float32_but_for_near_ties(model: Model, setting: str) -> None:
    seen = check(model.run(setting), model.reference)
    assert seen.worst > 0, "nothing was rounded: was it bfloat16?"


@pytest.mark.parametrize(("setting", "other"), PAIRS)
def test_ways_of_running_agree_but_for_near_ties(model: Model, setting: str, other: str) -> None:
    check(model.run(setting), model.run(other))


def test_a_small_mistake_is_more_than_rounding(model: Model) -> None:
    """One layer's attention too large by 15%."""
    wrong = model.wrong(attention_gain=1.15)
    for right in (model.reference, model.run("plain")):
        with pytest.raises(DifferentError):
            compare(wrong, right, TOLERANCE)
