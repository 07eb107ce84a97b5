"""Whole engines with a draft head: texts are those of an engine without one, and each draft is the plain reference's.

The drafts that are verified are other ones, of which 7 in 10 are right: a random head is seldom right.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from roseinfer.core.plan import HeadDrafts
from roseinfer.core.request import Prompt, Request
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.head import HeadProposer
from roseinfer.sched.drafting.marginal import MarginalPricing
from roseinfer.sched.drafting.pricing import Pricing
from roseinfer.sched.drafting.yields import KNOWN_STEPS_COUNT, DraftYields
from tests.equivalence.small_engines import PROMPTS, start
from tests.helpers.cases import cases
from tests.helpers.checkpoints import VOCAB, make_reference, save_reference
from tests.helpers.drafters import EveryDraft, Oracle
from tests.helpers.eagle_folders import EagleFolder
from tests.helpers.eagle_reference import EagleReference
from tests.models.eagle.test_head import streams_entering

HEAD = EagleFolder(target_hidden=32, vocabulary=VOCAB, ids=(1, 2), targets=tuple(range(1, VOCAB, 3)), nested=True)
MAX_DRAFTS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "prefix hits": {},
    "chunks": {"long_prefill_token_threshold": 7},
    "few blocks": {"num_kv_blocks": 24, "scheduling_policy": "fifo"},
    "depth 2": {"overlap": True},
    "host memory": {"num_kv_blocks": 24, "kv_offloading_size": 0.001, "scheduling_policy": "fifo"},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "again": {"temperature": 1.0, "top_k": 30},
    "branch": {"temperature": 0.8, "presence_penalty": 0.5},
}
Texts = dict[str, list[int]]


class RecordingHead(HeadProposer):
    """Head whose drafts are recorded with the tokens before them."""

    def __init__(self) -> None:
        super().__init__(MAX_DRAFTS)
        self.seen: list[tuple[str, list[int], HeadDrafts]] = []

    def made(self, request: Request, drafts: HeadDrafts) -> None:
        super().made(request, drafts)
        self.seen.append((request.request_id, list(request.tokens), drafts))


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.exhaustive), "olmo3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return a model whose layers are all alike, or one with windows, hence with two KV groups."""
    return make_reference(request.param)


@pytest.fixture(scope="module")
def folders(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("eagle")
    return save_reference(model, folder / "target"), HEAD.write(folder / "head")


def texts_of(core: EngineCore, samples: int = 1, prompts: Sequence[str] = tuple(PROMPTS)) -> Texts:
    """Return the outputs of prompts, the first ones before the others start."""
    found: Texts = defaultdict(list)
    for names in (prompts[:2], prompts[2:]):
        for number, name in enumerate(names):
            params = {"temperature": 0.0, **SAMPLING.get(name, {})}
            sampling = SequenceParams(max_tokens=18 + 2 * number, ignore_eos=True, seed=number, **params)
            core.add(Add(name, Prompt(PROMPTS[name], sampling), n=samples))
        while core.busy:
            for output in core.step():
                assert output.end is None or output.end.error is None, output
                found[output.request_id] += output.token_ids
    core.scheduler.check_integrity()
    return found


class FewRunning(EveryDraft):
    """Drafts while at most 3 requests run; otherwise steps overlap."""

    def worthwhile(self, running: Collection[Request]) -> bool:
        return 0 < len(running) <= 3


def start_with_head(
    folders: tuple[Path, Path], texts: Texts, pricing: Pricing | None = None, **options: Any
) -> tuple[EngineCore, RecordingHead]:
    target, head = folders
    core = start(target, speculation=f"eagle3:{head}", **options)
    recorder = RecordingHead()
    oracle = Oracle(texts, VOCAB, 0.7, most=MAX_DRAFTS)
    core.scheduler.drafting = Drafting((oracle,), pricing or EveryDraft(), MAX_DRAFTS, recorder)
    return core, recorder


def check_drafts(
    model: PreTrainedModel, seen: Sequence[tuple[str, list[int], HeadDrafts]], texts: Texts, least: int = 70
) -> None:
    """Compare greedy drafts with the reference's, as far as these are clear: at least `least` of them."""
    tensors = HEAD.tensors() | {"embed_tokens.weight": model.model.embed_tokens.weight.data}
    reference = EagleReference(tensors, heads=HEAD.heads, head_dim=HEAD.head_dim)
    streams: dict[str, list[torch.Tensor]] = {}
    compared = 0
    for request_id, tokens, drafts in seen:
        name = request_id.partition(":")[0]
        if name in SAMPLING:
            continue
        if request_id not in streams:
            entering = streams_entering(model, [*PROMPTS[name], *texts[request_id]])
            streams[request_id] = [entering[i] for i in HEAD.ids or ()]
        known = [stream[: len(tokens) - 1] for stream in streams[request_id]]
        expected, logits = reference.draft(tokens, known, len(drafts.token_ids))
        for found, wanted, values, chance in zip(drafts.token_ids, expected, logits, drafts.chances, strict=True):
            best = values.topk(2).values
            if best[0] - best[1] < 1e-3:
                break
            assert found == wanted, (request_id, len(tokens))
            assert abs(chance - float(values.softmax(-1).max())) < 1e-3
            compared += 1
    assert compared >= least


@cases("setting", ["chunks", "depth 2", "host memory"], exhaustive=["plain", "prefix hits", "few blocks"])
def test_texts_stay_and_drafts_are_the_references(
    model: PreTrainedModel, folders: tuple[Path, Path], setting: str
) -> None:
    core = start(folders[0], speculation="off", **SETTINGS[setting])
    plain = texts_of(core)
    core.close()
    core, head = start_with_head(folders, plain, **SETTINGS[setting])
    assert texts_of(core) == plain
    stats = core.stats()
    core.close()
    assert (stats.prefix_hits > 0) == (setting != "plain")
    assert (stats.preemptions > 0) == (setting in ("few blocks", "host memory"))
    check_drafts(model, head.seen, plain)


def test_several_samples_share_a_prompt(model: PreTrainedModel, folders: tuple[Path, Path]) -> None:
    core = start(folders[0], speculation="off")
    plain = texts_of(core, samples=3)
    core.close()
    core, head = start_with_head(folders, plain)
    assert texts_of(core, samples=3) == plain
    core.close()
    check_drafts(model, head.seen, plain)


def test_the_head_catches_up_after_steps_without_drafts(model: PreTrainedModel, folders: tuple[Path, Path]) -> None:
    core = start(folders[0], speculation="off")
    plain = texts_of(core)
    core.close()
    core, head = start_with_head(folders, plain, FewRunning(), overlap=True)
    assert texts_of(core) == plain
    core.close()
    assert len(head.seen) < sum(map(len, plain.values())) / 2
    check_drafts(model, head.seen, plain, least=30)


class RightHead(RecordingHead):
    """Head whose drafts are replaced by the right tokens, as far as these are known."""

    def __init__(self, texts: Texts) -> None:
        super().__init__()
        self._texts = texts

    def made(self, request: Request, drafts: HeadDrafts) -> None:
        first, count = request.num_outputs, len(drafts.token_ids)
        right = tuple(self._texts[request.request_id][first : first + count])
        super().made(request, HeadDrafts(right, (0.9,) * len(right)))


def test_as_many_drafts_are_made_as_pay(model: PreTrainedModel, folders: tuple[Path, Path]) -> None:
    """The whole loop with prices: asked for, made, verified, learnt from."""
    core = start(folders[0], speculation="off")
    plain = texts_of(core)
    core.close()
    core, _ = start_with_head(folders, plain)
    head = RightHead(plain)
    cost = CostModel(CostParams(step_s=5e-3, token_s=1e-4, row_s=1e-4), fit=False)
    for _ in range(KNOWN_STEPS_COUNT):
        cost.observe(Work(decode_rows=1), 5.1e-3)
    core.scheduler.drafting = Drafting((head,), MarginalPricing(cost, DraftYields()), MAX_DRAFTS, head)
    assert texts_of(core) == plain
    counts = core.scheduler.drafting.counts["eagle3"]
    core.close()
    assert sum(counts.accepted) == sum(counts.drafted) > 60 and len(counts.drafted) == MAX_DRAFTS


@cases(
    "options",
    [{"kv_cache_dtype": "fp8", "dtype": "bfloat16"}],
    exhaustive=[{"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}],
)
def test_other_dtypes(folders: tuple[Path, Path], options: dict[str, str]) -> None:
    """The head's layer of the cache has the dtype of the others. Greedy texts may part where two tokens nearly tie."""
    core = start(folders[0], speculation="off", **options)
    plain = texts_of(core)
    core.close()
    core, head = start_with_head(folders, plain, **options)
    texts = texts_of(core)
    core.close()
    same = [name for name, text in plain.items() if texts[name] == text]
    assert len(same) >= len(plain) // 2 and head.seen


def test_outputs_that_fill_the_context(folders: tuple[Path, Path]) -> None:
    """Drafts after the last tokens would have no room in the block table."""

    def run(core: EngineCore) -> list[int]:
        sampling = SequenceParams(max_tokens=36 - len(PROMPTS["branch"]), temperature=0.0, ignore_eos=True)
        core.add(Add("full", Prompt(PROMPTS["branch"], sampling)))
        found: list[int] = []
        while core.busy:
            for output in core.step():
                found += output.token_ids
        core.close()
        return found

    plain = run(start(folders[0], speculation="off", max_model_len=36))
    assert len(plain) == 36 - len(PROMPTS["branch"])
    core, head = start_with_head(folders, {"full:0": plain}, max_model_len=36)
    assert run(core) == plain
    assert max(len(tokens) + len(drafts.token_ids) for _, tokens, drafts in head.seen) < 36
