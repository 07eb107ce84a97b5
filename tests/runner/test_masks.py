"""Masks in the sampler and in the runner: forbidden tokens are never sampled, and nothing else changes."""

from array import array
from contextlib import closing
from typing import Any

import pytest
import torch

from roseinfer import LLM
from roseinfer.config.hub import resolve_model
from roseinfer.core.clock import ManualClock, MonotonicClock
from roseinfer.core.guide import GuideSpec
from roseinfer.core.plan import Admission, Row, StepPlan, TokenMasks
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.options import make_engine_config
from roseinfer.runner.build import build_runner
from roseinfer.runner.masks import HostMasks, MaskTable, RowMasks
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.sampler import NOT_FINITE, NOTHING_LEFT, Sampler
from roseinfer.runner.threaded import ThreadedRunner
from tests.helpers.engines import run_dry
from tests.helpers.guides import ArithmeticGuides, obeys
from tests.runner.test_sampler import admission, make_table, random_logits

VOCAB = 77  # neither whole bytes nor whole words
CPU = torch.device("cpu")


def token_masks(allowed: dict[int, set[int]], vocab_size: int = VOCAB) -> TokenMasks:
    size = TokenMasks.words_per_row(vocab_size)
    words = array("I", bytes(4 * size * len(allowed)))
    for line, tokens in enumerate(allowed.values()):
        for token in tokens:
            words[line * size + token // 32] |= 1 << token % 32
    return TokenMasks(tuple(allowed), memoryview(words))


def placed(masks: TokenMasks, sampling: list[int]) -> RowMasks | None:
    return HostMasks(VOCAB, CPU).place(masks, sampling)


def test_rows_of_the_plan_become_rows_of_the_sampler():
    masks = placed(token_masks({4: {0}, 7: {9, 76}}), [2, 7, 3, 4])
    assert masks.at == [3, 1]
    assert masks.bits[1].tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0]
    assert placed(token_masks({}), [2, 7]) is None, "every guide is dormant"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 0]])
def test_forbidden_tokens_become_minus_infinity_in_any_dtype_and_layout(dtype, rows):
    """Use columns of a wider buffer, like a GPU's logits."""
    buffer = torch.randn(4, VOCAB + 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, logits = buffer.clone(), buffer[:, :VOCAB]
    allowed = {row: {row, 31, 32, 64 + row} for row in rows}
    MaskTable(CPU).apply(logits, placed(token_masks(allowed), [0, 1, 2, 3]))
    for row in range(4):
        kept = allowed.get(row, set(range(VOCAB)))
        for token in range(VOCAB):
            expected = before[row, token] if token in kept else -torch.inf
            assert logits[row, token] == expected
    assert torch.equal(buffer[:, VOCAB:], before[:, VOCAB:])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_k": 5, "top_p": 0.8},
        {"temperature": 1.0, "frequency_penalty": 1.5, "logit_bias": ((5, 30.0),)},
    ],
    ids=["greedy", "drawn", "filtered", "edited"],
)
def test_a_mask_equals_minus_infinity_in_the_logits(params):
    def tokens(logits: torch.Tensor, masks: RowMasks | None) -> list[int]:
        table = make_table(vocab_size=VOCAB)
        table.admit([admission(seat, [1, 2, 5], 2, seed=seat, **params) for seat in range(6)])
        return Sampler(table).sample(logits, list(range(6)), [3] * 6, masks=masks).tokens.tolist()

    logits = random_logits(6, vocab_size=VOCAB)
    allowed = {row: {t for t in range(VOCAB) if t % (row + 2) == 1} for row in (0, 2, 3, 5)}
    banned = logits.clone()
    for row, kept in allowed.items():
        banned[row, [t for t in range(VOCAB) if t not in kept]] = -torch.inf
    got = tokens(logits.clone(), placed(token_masks(allowed), list(range(6))))
    assert got == tokens(banned, None)
    assert all(got[row] in kept for row, kept in allowed.items())


def test_log_probabilities_are_those_of_the_raw_logits():
    table = make_table(vocab_size=VOCAB)
    table.admit([admission(seat, [1], temperature=0.0, logprobs=2) for seat in range(2)])
    logits = random_logits(2, vocab_size=VOCAB)
    raw = logits.log_softmax(-1)
    masks = placed(token_masks({0: {7}, 1: {8}}), [0, 1])
    sampled = Sampler(table).sample(logits, [0, 1], [1, 1], masks=masks)
    entries = [entry for part in sampled.scores for entry in part.to_python()]
    assert [entry.token_id for entry in entries] == [7, 8] == sampled.tokens.tolist()
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(raw[row, 7 + row].item())
        assert entry.rank == 1 + int((raw[row] > raw[row, 7 + row]).sum())
        assert entry.top[0][1] == pytest.approx(raw[row].max().item())


def test_a_mask_that_allows_nothing_and_a_row_that_is_not_finite_fail_alone():
    table = make_table(vocab_size=VOCAB)
    table.admit([admission(seat, [1], temperature=float(seat > 0)) for seat in range(4)])
    logits = random_logits(4, vocab_size=VOCAB)
    logits[2] = torch.nan
    masks = placed(token_masks({0: set(), 1: set(), 2: {4}, 3: {6}}), [0, 1, 2, 3])
    tokens = Sampler(table).sample(logits, [0, 1, 2, 3], [1] * 4, masks=masks).tokens.tolist()
    assert tokens == [NOTHING_LEFT, NOTHING_LEFT, NOT_FINITE, 6]


@pytest.mark.parametrize("end", [3, 5])
def test_min_tokens_gives_way_where_only_the_end_is_left(end: int):
    """Row 1 has other tokens left; row 2 has no mask."""
    table = make_table(vocab_size=VOCAB)
    params = {"temperature": 0.0, "min_tokens": 4, "stop": (7, 8)}
    table.admit([admission(seat, [1, 2], **params) for seat in range(3)])
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 8], logits[:, 5] = 8.0, 9.0, 7.0
    masks = placed(token_masks({0: {7, 8}, 1: {7, 8, 6}}), [0, 1, 2])
    tokens = Sampler(table).sample(logits.clone(), [0, 1, 2], [end] * 3, masks=masks).tokens.tolist()
    assert tokens == [8, 6, 5]
    masks = placed(token_masks({0: {7, 8}, 1: {7, 8, 6}}), [0, 1, 2])
    tokens = Sampler(table).sample(logits, [0, 1, 2], [6] * 3, masks=masks).tokens.tolist()
    assert tokens == [8, 8, 8], "long enough"


@pytest.mark.parametrize(
    "params", [{"allowed_token_ids": (3, 4)}, {"bad_token_ids": ((9,),)}, {"allowed_token_ids": (9,), "min_tokens": 2}]
)
def test_a_mask_and_edits_that_leave_nothing_fail_alone(params):
    table = make_table(vocab_size=VOCAB)
    table.admit([admission(0, [1], stop=(2,), **params), admission(1, [1])])
    masks = placed(token_masks({0: {9} - {9 if "min_tokens" in params else 0}, 1: {9}}), [0, 1])
    tokens = Sampler(table).sample(random_logits(2, vocab_size=VOCAB), [0, 1], [1, 1], masks=masks).tokens.tolist()
    assert tokens == [NOTHING_LEFT, 9]


def tiny_runner(**options: Any) -> ModelRunner:
    """Return a runner of the embedded model."""
    return build_runner(make_engine_config(model="tiny", **options), resolve_model("tiny")).runner


def said_under_guides(overlap: bool) -> dict[str, list[int]]:
    options: dict[str, Any] = {"threads": 1, "num_kv_blocks": 64, "max_num_seqs": 4, "device": "cpu"}
    with LLM("tiny", **options, overlap=overlap) as llm, closing(tiny_runner(**options)) as runner:
        core = EngineCore(
            llm.engine.core.scheduler,
            ThreadedRunner(runner) if overlap else runner,
            MonotonicClock(),
            depth=1 + overlap,
            eos_ids=llm.engine.info.facts.eos_token_ids,
            vocab_size=llm.engine.info.facts.vocab_size,
            guides=ArithmeticGuides(llm.engine.info.facts.vocab_size),
        )
        for i in range(3):
            params = SequenceParams(max_tokens=9, temperature=0.5 * i, seed=i, ignore_eos=True)
            core.add(
                Add(f"guided-{i}", Prompt([5, 6, 7 + i], params, RequestMeta(), GuideSpec(grammar=f"{i + 3},6,{i}")), 1)
            )
        core.add(Add("free", Prompt([5, 6, 7], SequenceParams(max_tokens=9, temperature=0.0, ignore_eos=True))))
        return {name: done.tokens for name, done in run_dry(core).items()}


def test_the_embedded_model_obeys_guides_in_a_mixed_batch():
    """Run the engine's own runner at depth 1 and, on a thread, at depth 2."""
    said = said_under_guides(overlap=False)
    assert all(obeys(said[f"guided-{i}:0"], f"{i + 3},6,{i}") for i in range(3))
    assert [len(said[f"guided-{i}:0"]) for i in range(3)] == [6] * 3 and len(said["free:0"]) == 9
    assert said_under_guides(overlap=True) == said


@pytest.mark.parametrize("guided", [True, False])
def test_a_step_that_waits_for_its_masks_takes_that_long(monkeypatch, guided):
    """Check the duration that the cost model receives, with the test's clock."""
    clock = ManualClock()
    monkeypatch.setattr("roseinfer.runner.timing.perf_counter", clock.now)
    with closing(tiny_runner(threads=1, num_kv_blocks=8, max_num_seqs=1, device="cpu")) as runner:
        params = SequenceParams(max_tokens=4)
        plan = StepPlan(
            0,
            [Row("a", 0, 0, 2, 1, True, 0, 0, ())],
            [Admission("a", 0, [5, 6], 2, params, 0, (), (0,))],
            num_tokens=2,
            guided=(0,) if guided else (),
        )
        handle = runner.submit(plan)
        words = runner.mask_space(1)
        words[:] = memoryview(array("I", [0xFFFFFFFF] * len(words)))
        clock.advance(3.0)
        runner.sample(handle, TokenMasks((0,), words) if guided else None)
        assert runner.collect(handle).duration_s == (3.0 if guided else 0.0)
