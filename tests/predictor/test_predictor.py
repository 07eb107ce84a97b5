"""Training and predicting: a planted relation is learnt, files bring back what was saved."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from roseinfer.cli import main as cli
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError
from roseinfer.predictor.config import TrainConfig
from roseinfer.predictor.data import TrainingRows
from roseinfer.predictor.features import FeatureSpec, bags_of
from roseinfer.predictor.model import LengthPredictor, PredictorSettings
from roseinfer.predictor.train import TrainingResult, train
from roseinfer.predictor.vocabulary import fingerprint

CONFIG = TrainConfig(seed=1, epochs=20)  # more find nothing better
KINDS = {7: 40, 8: 200, 9: 600}  # first token -> output length


def planted(count: int, seed: int = 0, *, related: bool = True) -> TrainingRows:
    """The first token says how long the answer is, give or take 10%, and the last one may double it."""
    rng, rows = random.Random(seed), TrainingRows()
    for _ in range(count):
        kind, last = rng.choice(list(KINDS)), rng.choice([20, 21])
        middle = [rng.randrange(100, 400) for _ in range(rng.randrange(5, 60))]
        length = KINDS[kind if related else rng.choice(list(KINDS))] * (last - 19 if related else 1)
        rows.add([kind, *middle, last], max(1, round(length * rng.uniform(0.9, 1.1))))
    return rows


@pytest.fixture(scope="module")
def trained() -> TrainingResult:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(planted(2000), CONFIG)
    finally:
        torch.set_num_threads(threads)


def test_it_learns_a_planted_relation(trained: TrainingResult) -> None:
    figures = trained.figures["mean"]
    assert figures.rows == 400 and trained.train_rows == 1200
    assert figures.tau > 0.75 and figures.rmse < 0.35 * figures.rmse_constant
    assert trained.figures["mode"].within_2 > 0.6
    fresh = planted(300, seed=2)
    said = np.asarray(trained.predictor.predict_batch(fresh.prompts))
    for first, length in KINDS.items():
        for last, factor in ((20, 1), (21, 2)):
            alike = [i for i, prompt in enumerate(fresh.prompts) if (prompt[0], prompt[-1]) == (first, last)]
            assert np.mean(said[alike]) == pytest.approx(factor * length, rel=0.2, abs=50)


def test_it_does_not_see_a_relation_that_is_not_there() -> None:
    figures = train(planted(600, related=False), replace(CONFIG, epochs=3)).figures["mean"]
    assert abs(figures.tau) < 0.2 and figures.rmse == pytest.approx(figures.rmse_constant, rel=0.15)


def test_a_batch_says_what_single_prompts_say(trained: TrainingResult) -> None:
    prompts = planted(50, seed=9).prompts
    batch = trained.predictor.predict_batch(prompts)
    assert batch == [trained.predictor.predict(prompt) for prompt in prompts]
    assert trained.predictor.predict_batch([]) == []
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(trained.predictor.predict, prompts)) == batch


@pytest.mark.parametrize("prompt", [[0], [2**31 - 1], list(range(5000)), [3] * 40])
def test_prompts_of_any_kind(prompt: list[int], trained: TrainingResult) -> None:
    assert 1 <= trained.predictor.predict(prompt) <= 100 * trained.predictor.settings.width
    shares = trained.predictor.probabilities([prompt])
    assert shares.shape == (1, 100) and shares.sum() == pytest.approx(1, abs=1e-5)


def test_an_empty_prompt_is_an_error(trained: TrainingResult) -> None:
    with pytest.raises(ValueError, match="empty"):
        trained.predictor.predict_batch([[1], []])


def test_the_modes_of_reading(trained: TrainingResult) -> None:
    settings, weights = trained.predictor.settings, trained.predictor.weights
    shares = np.zeros((1, 100), dtype=np.float32)
    shares[0, [10, 50]] = 0.6, 0.4
    middle = (np.arange(100) + 0.5) * settings.width
    assert LengthPredictor(replace(settings, readout="mode"), weights).lengths(shares)[0] == middle[10]
    found = LengthPredictor(settings, weights).lengths(shares)[0]
    assert found == pytest.approx(0.6 * middle[10] + 0.4 * middle[50])


def test_equal_seeds_train_equal_weights() -> None:
    rows = planted(200)
    first, second, other = (train(rows, TrainConfig(epochs=2, seed=seed)).predictor.weights for seed in (4, 4, 5))
    assert np.array_equal(first.table, second.table) and np.array_equal(first.out, second.out)
    assert not np.array_equal(first.table, other.table)


def test_training_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    train(planted(60), TrainConfig(epochs=1))
    assert torch.equal(state, torch.get_rng_state())


def test_selected_bags_are_those_of_the_prompts() -> None:
    prompts = [[1, 2, 3], [4], [5] * 90, [6, 7]]
    some = bags_of(prompts, FeatureSpec()).select(np.asarray([2, 0]))
    again = bags_of([prompts[2], prompts[0]], FeatureSpec())
    assert all(np.array_equal(a, b) for a, b in zip(some, again, strict=True))
    assert again.ids.min() >= 0 and again.ids.max() < FeatureSpec().table


# --- the file -----------------------------------------------------------------------------------------------------
def test_file_round_trip(trained: TrainingResult, tmp_path) -> None:
    file = str(tmp_path / "predictor.safetensors")
    trained.predictor.save(file)
    loaded = LengthPredictor.load(file)
    assert loaded.settings == trained.predictor.settings
    prompts = planted(20, seed=3).prompts
    assert loaded.predict_batch(prompts) == trained.predictor.predict_batch(prompts)


def test_a_file_from_before_vocabularies_were_noted(trained: TrainingResult, tmp_path) -> None:
    file = tmp_path / "predictor"
    trained.predictor.save(str(file))
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    settings = json.loads(metadata["settings"])
    del settings["vocabulary"]
    save_file(load_file(file), file, {**metadata, "settings": json.dumps(settings)})
    loaded = LengthPredictor.load(str(file))
    assert loaded.settings.vocabulary == "" and loaded.predict([7, 20]) == trained.predictor.predict([7, 20])


def test_files_that_hold_no_predictor(trained: TrainingResult, tmp_path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        LengthPredictor.load(str(tmp_path / "nowhere"))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="no length predictor"):
        LengthPredictor.load(str(tmp_path / "text"))
    good = tmp_path / "good"
    trained.predictor.save(str(good))
    tensors = load_file(good)
    save_file(tensors, tmp_path / "other")
    with pytest.raises(ConfigError, match="no length predictor of this version"):
        LengthPredictor.load(str(tmp_path / "other"))
    cut = replace(trained.predictor.weights, bias=trained.predictor.weights.bias[:-1])
    LengthPredictor(trained.predictor.settings, cut).save(str(tmp_path / "cut"))
    with pytest.raises(ConfigError, match="do not fit"):
        LengthPredictor.load(str(tmp_path / "cut"))
    with pytest.raises(ConfigError, match="cannot write"):
        trained.predictor.save(str(tmp_path / "no" / "folder"))


# --- the command --------------------------------------------------------------------------------------------------
def test_the_command(capsys, tmp_path) -> None:
    rows = planted(300)
    pairs = zip(rows.prompts, rows.lengths, strict=True)
    lines = [json.dumps({"prompt_token_ids": prompt, "output_len": length}) for prompt, length in pairs]
    data, out, figures = tmp_path / "data.jsonl", tmp_path / "predictor", tmp_path / "figures.json"
    data.write_text("\n".join([*lines, "oops", json.dumps({"prompt": "def f(", "output_len": 40})]))
    options = ["--out", str(out), "--epochs", "2", "--longest", "1000", "--json", str(figures)]
    assert cli.main(["train-predictor", str(data), *options]) == 0
    printed = capsys.readouterr().out
    assert "1 rows left out: line 301: no JSON" in printed and "tau" in printed and "rmse" in printed
    predictor = LengthPredictor.load(str(out))
    vocabulary = fingerprint(load_tokenizer(ModelConfig()).backend.get_vocab(with_added_tokens=True))
    assert predictor.settings == PredictorSettings(width=10, tokenizer="tiny", vocabulary=vocabulary)
    assert predictor.predict([7, 500, 20]) > 0
    assert json.loads(figures.read_text())["figures"]["mean"]["rows"] == 61


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["data.jsonl"], "--out"),
        (["--out", "x"], "--data"),
        (["nowhere.jsonl", "--out", "x"], "nowhere.jsonl"),
        (["nowhere.jsonl", "--out", "x", "--epochs", "0"], "--epochs"),
    ],
)
def test_refused_by_name(argv, message, capsys) -> None:
    assert cli.main(["train-predictor", *argv]) == 2
    assert message in capsys.readouterr().err
