"""EAGLE-3 heads over the paged store, compared with a plain reference on whole sequences."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from roseinfer.models.config import read_model_spec
from roseinfer.models.decoder import Decoder
from roseinfer.models.eagle.config import read_eagle_spec
from roseinfer.models.eagle.loader import load_eagle_head
from roseinfer.models.eagle.model import DraftingModel
from roseinfer.models.step import StepContext
from tests.helpers.batches import HandRow, HandRunner, make_batch
from tests.helpers.cases import each_value
from tests.helpers.checkpoints import VOCAB, make_reference, save_reference
from tests.helpers.eagle_folders import EagleFolder
from tests.helpers.eagle_reference import EagleReference
from tests.helpers.loaded import load

LAYERS, HIDDEN = 5, 32
FLAGS = ((), ("norm_before_residual",), ("norm_before_fc",), ("fc_norm",), ("norm_output",))
GAPS = tuple(sorted(random.Random(3).sample(range(VOCAB), 20)))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def plain_target() -> PreTrainedModel:
    return make_reference("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(plain_target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = save_reference(plain_target, tmp_path_factory.mktemp("target"))
    spec = read_model_spec(folder)
    model = load(folder, spec)
    assert isinstance(model, Decoder)
    return model


def drawn_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


@torch.inference_mode()
def streams_entering(model: PreTrainedModel, tokens: list[int]) -> list[torch.Tensor]:
    """Return the residual stream entering each layer, and the one after the last: [T, hidden] each."""
    caught: list[torch.Tensor] = []
    layers = model.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, args: caught.append(args[0][0].clone())) for layer in layers]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0][0].clone())))
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return caught


def folder_of(**options: Any) -> EagleFolder:
    return EagleFolder(target_hidden=HIDDEN, vocabulary=VOCAB, **options)


def reference_of(folder: EagleFolder, model: PreTrainedModel, **changes: Any) -> EagleReference:
    tensors = folder.tensors()
    tensors.setdefault("embed_tokens.weight", model.model.embed_tokens.weight.data)
    tensors.setdefault("lm_head.weight", model.lm_head.weight.data)
    options = {"heads": folder.heads, "head_dim": folder.head_dim, "flags": folder.flags} | changes
    return EagleReference(tensors, **options)


class Sequences:
    """Sequences that are computed in pieces by a model with a head, in the same seats throughout."""

    def __init__(self, target: Decoder, folder: Path, texts: Sequence[list[int]], aux: str = "auto") -> None:
        spec = read_eagle_spec(folder, target.spec, aux)
        self.head = load_eagle_head(folder, spec, target, load_format="auto", seed=0)
        self.model = DraftingModel(target, self.head)
        self.model.take_seats(len(texts) + 1, 256)
        self.runner = HandRunner(self.model, block_size=4)
        self.texts = texts
        self.tables = [self.runner.blocks.table(len(text) + 8) for text in texts]
        self.computed = [0] * len(texts)

    def row(self, number: int, count: int, write_from: int = 0) -> HandRow:
        return HandRow(
            tokens=self.texts[number],
            table=self.tables[number],
            start=self.computed[number],
            count=count,
            write_from=write_from,
        )

    def compute(self, *counts: int) -> torch.Tensor:
        """Compute more tokens of each sequence. Return the states of their last ones."""
        self.runner.run([self.row(number, count) for number, count in enumerate(counts)])
        self.computed = [done + count for done, count in zip(self.computed, counts, strict=True)]
        ends = torch.tensor(counts).cumsum(0) - 1
        return self.model.states[ends]

    @torch.inference_mode()
    def draft(self, states: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
        """Draft greedily after the first token that is not computed, as `EagleReference.draft` does."""
        known = [text[: done + 1] for text, done in zip(self.texts, self.computed, strict=True)]
        drafts: list[list[int]] = [[] for _ in known]
        logits: list[list[torch.Tensor]] = [[] for _ in known]
        for _ in range(count):
            rows = [
                HandRow(tokens=tokens, table=table, start=len(tokens) - 1, count=1)
                for tokens, table in zip(known, self.tables, strict=True)
            ]
            batch = make_batch(rows, self.runner.store.block_size)
            self.runner.attention.begin(batch, self.runner.store)
            x = self.head.forward(batch.input_ids, states, StepContext(batch, self.runner.attention))
            states = self.head.next_states(x)
            for number, found in enumerate(self.head.logits(x)):
                token = int(self.head.target_ids[found.argmax()])
                known[number].append(token)
                drafts[number].append(token)
                logits[number].append(found)
        return drafts, logits


def check_against(
    reference: EagleReference,
    streams: Sequence[Sequence[torch.Tensor]],
    sequences: Sequences,
    states: torch.Tensor,
    count: int = 4,
) -> None:
    drafts, logits = sequences.draft(states, count)
    for number, (text, done) in enumerate(zip(sequences.texts, sequences.computed, strict=True)):
        expected, wanted = reference.draft(text[: done + 1], [stream[:done] for stream in streams[number]], count)
        for found, want in zip(logits[number], wanted, strict=True):
            assert want.std() > 0.1
            torch.testing.assert_close(found, want[reference.targets.argsort()], rtol=0, atol=TOLERANCE)
        assert drafts[number] == expected


@pytest.mark.parametrize("boundaries", [(0,), (1, 2), (0, 3, LAYERS), (2, 4, 5)])
def test_states_are_the_streams_that_enter_layers(
    target: Decoder, plain_target: PreTrainedModel, boundaries: tuple[int, ...]
) -> None:
    tokens = drawn_tokens(9)
    runner = HandRunner(target)
    batch = make_batch([HandRow(tokens=tokens, table=runner.blocks.table(9), start=0, count=9)], 16)
    with torch.inference_mode():
        runner.attention.begin(batch, runner.store)
        x, states = target.forward_with_states(batch, runner.attention, boundaries)
        runner.attention.begin(batch, runner.store)
        torch.testing.assert_close(x, target.forward(batch, runner.attention))
    caught = streams_entering(plain_target, tokens)
    torch.testing.assert_close(states, torch.cat([caught[i] for i in boundaries], -1), rtol=0, atol=TOLERANCE)


@each_value(flags=FLAGS, nested=[False, True])
def test_drafts_of_each_flag(
    target: Decoder, plain_target: PreTrainedModel, tmp_path: Path, flags: tuple[str, ...], nested: bool
) -> None:
    folder = folder_of(ids=(2, 3, 5), targets=GAPS, flags=flags, nested=nested)
    texts = [drawn_tokens(30, seed) for seed in (1, 2)]
    streams = [[streams_entering(plain_target, text)[i] for i in (2, 3, 5)] for text in texts]
    sequences = Sequences(target, folder.write(tmp_path), texts)
    reference = reference_of(folder, plain_target)
    for counts in ((5, 1), (1, 7), (1, 1), (8, 2), (3, 3)):
        check_against(reference, streams, sequences, sequences.compute(*counts))


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_a_flag_matters(plain_target: PreTrainedModel, flag: str) -> None:
    """Else the tests above would pass for a head that ignores it."""
    folder, text = folder_of(ids=(2, 3, 5), flags=(flag,)), drawn_tokens(12)
    streams = [streams_entering(plain_target, text)[i][:-1] for i in (2, 3, 5)]
    read = reference_of(folder, plain_target).draft(text, streams, 2)[1]
    misread = reference_of(folder, plain_target, flags=()).draft(text, streams, 2)[1]
    assert (read[-1] - misread[-1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(("ids", "aux"), [((1, 2, 4), "auto"), ((1, 2, 4), "outputs"), ((2, 3, 5), "inputs")])
def test_both_meanings_of_listed_layers(
    target: Decoder, plain_target: PreTrainedModel, tmp_path: Path, ids: tuple[int, ...], aux: str
) -> None:
    folder = folder_of(ids=ids)
    text = drawn_tokens(12)
    entering = streams_entering(plain_target, text)
    sequences = Sequences(target, folder.write(tmp_path), [text], aux)
    states = sequences.compute(11)
    reference = reference_of(folder, plain_target)
    check_against(reference, [[entering[i] for i in (2, 3, 5)]], sequences, states)
    with pytest.raises(AssertionError):
        check_against(reference, [[entering[i] for i in (1, 2, 4)]], sequences, states)


def test_without_a_list_the_authors_layers_are_read(
    target: Decoder, plain_target: PreTrainedModel, tmp_path: Path
) -> None:
    model = make_reference("llama", num_hidden_layers=8)
    spec = read_model_spec(save_reference(model, tmp_path / "target"))
    loaded = load(tmp_path / "target", spec)
    assert isinstance(loaded, Decoder)
    folder, text = folder_of(ids=None), drawn_tokens(9)
    entering = streams_entering(model, text)
    sequences = Sequences(loaded, folder.write(tmp_path / "head"), [text])
    states = sequences.compute(8)
    check_against(reference_of(folder, model), [[entering[i] for i in (2, 4, 5)]], sequences, states)


@pytest.mark.parametrize(
    ("rope", "factors"),
    [
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, [0.25, 0.25, 0.25, 0.25]),
        (
            # Frequencies 1, .1, .01, .001 have wavelengths of 6.3, 63, 628 and 6283 tokens: kept, blended, stretched.
            {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            [1.0, 1 / 8 + 7 / 8 * (128 / (20 * torch.pi) - 1) / 3, 1 / 8, 1 / 8],
        ),
    ],
)
def test_the_heads_own_rotation(
    target: Decoder, plain_target: PreTrainedModel, tmp_path: Path, rope: dict[str, Any], factors: list[float]
) -> None:
    folder, text = folder_of(rope=rope), drawn_tokens(100)
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8) * torch.tensor(factors)
    reference = reference_of(folder, plain_target, frequencies=frequencies)
    streams = [[streams_entering(plain_target, text)[i] for i in (2, 3)]]
    sequences = Sequences(target, folder.write(tmp_path), [text])
    check_against(reference, streams, sequences, sequences.compute(95))
    with pytest.raises(AssertionError):
        check_against(reference_of(folder, plain_target), streams, sequences, sequences.compute(1))


def test_rows_of_the_output_matrix_are_sorted(target: Decoder, plain_target: PreTrainedModel, tmp_path: Path) -> None:
    shuffled = random.Random(0).sample(GAPS, len(GAPS))
    folder, text = folder_of(targets=tuple(shuffled)), drawn_tokens(9)
    sequences = Sequences(target, folder.write(tmp_path), [text])
    assert sequences.head.target_ids.tolist() == sorted(GAPS)
    streams = [[streams_entering(plain_target, text)[i] for i in (2, 3)]]
    check_against(reference_of(folder, plain_target), streams, sequences, sequences.compute(8))


@pytest.mark.parametrize(
    "options",
    [
        {"shares": ("embed_tokens", "lm_head")},
        {"shares": ()},
        {"shares": (), "hidden": 24, "targets": GAPS},
        {"heads": 2, "kv_heads": 1, "head_dim": 12},
    ],
)
def test_shared_and_own_tensors_and_sizes(
    target: Decoder, plain_target: PreTrainedModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder, text = folder_of(**options), drawn_tokens(20)
    sequences = Sequences(target, folder.write(tmp_path), [text])
    streams = [[streams_entering(plain_target, text)[i] for i in (2, 3)]]
    reference = reference_of(folder, plain_target)
    sequences.compute(7)
    check_against(reference, streams, sequences, sequences.compute(3))


def test_a_prefix_hit_computes_one_token_again(target: Decoder, plain_target: PreTrainedModel, tmp_path: Path) -> None:
    """A row that begins one token before the first slot to write, in another seat, drops nothing of the prefix."""
    text = drawn_tokens(20)
    folder = folder_of()
    streams = [streams_entering(plain_target, text)[i] for i in (2, 3)]
    sequences = Sequences(target, folder.write(tmp_path), [text, text])
    runner, shared = sequences.runner, sequences.tables[0][:2]
    sequences.tables[1] = [*shared, *sequences.tables[1][2:]]
    runner.run([sequences.row(0, 12)])
    before = [part[shared].clone() for part in runner.store.parts]
    # Seat 1 has no state of token 6, so slot 7 may not be written.
    sequences.computed = [12, 7]
    runner.run([sequences.row(0, 1), replace(sequences.row(1, 9), write_from=8)])
    for part, old in zip(runner.store.parts, before, strict=True):
        assert torch.equal(part[shared].nan_to_num(7.0), old.nan_to_num(7.0))
    sequences.computed = [13, 16]
    states = sequences.model.states[torch.tensor([0, 9])]
    check_against(reference_of(folder, plain_target), [streams, streams], sequences, states)


@torch.inference_mode()
def test_rows_that_pad_a_captured_step_change_nothing(target: Decoder, tmp_path: Path) -> None:
    """They name the spare seat, and begin and end after the step's last token."""
    texts = [drawn_tokens(9, 1), drawn_tokens(9, 2)]
    folder = folder_of().write(tmp_path)
    kept = []
    for padding in (0, 2):
        torch.manual_seed(0)
        sequences = Sequences(target, folder, texts)
        sequences.compute(4, 3)
        batch = make_batch([sequences.row(0, 1), sequences.row(1, 4)], 4)
        sequences.runner.attention.begin(batch, sequences.runner.store)
        end, spare = batch.query_start[-1:], torch.tensor([len(texts)] * padding, dtype=torch.int32)
        padded = replace(
            batch,
            query_start=torch.cat((batch.query_start, *[end] * padding)),
            table_rows=torch.cat((batch.table_rows, spare)),
        )
        sequences.model.forward(padded, sequences.runner.attention)
        sequences.computed = [5, 7]
        kept.append(sequences.compute(1, 1))
        kept += [part.clone().nan_to_num(7.0) for part in sequences.runner.store.parts]
    for plain, padded_too in zip(kept[: len(kept) // 2], kept[len(kept) // 2 :], strict=True):
        assert torch.equal(plain, padded_too)


def test_a_random_head_drafts_spread_tokens(target: Decoder, tmp_path: Path) -> None:
    folder = folder_of(targets=GAPS, ids=(2, 3))
    spec = read_eagle_spec(folder.write(tmp_path), target.spec)
    head = load_eagle_head(Path("nowhere"), spec, target, load_format="dummy", seed=0)
    assert head.target_ids.tolist() == [i * VOCAB // len(GAPS) for i in range(len(GAPS))]
    assert head.logits(torch.randn(2, HIDDEN)).shape == (2, len(GAPS))
