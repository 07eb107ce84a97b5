"""Prompts of every dataset, with a tokenizer whose tokens are bytes."""

import json
import random

import pytest

from roseinfer.bench.arrivals import DatasetSample, Ramp, arrival_times, plan
from roseinfer.bench.codec import make_texts
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.datasets import load
from roseinfer.bench.serve_config import DatasetConfig
from roseinfer.bench.slo_classes import LoadClass
from roseinfer.core.errors import ConfigError


class Bytes:
    """Codec whose ids are bytes. Two equal letters merge into one token, so some lists of ids do not survive a round
    trip.
    """

    name = "bytes"
    added = 1
    pool = tuple(map(ord, "abcdefgh "))

    def encode(self, texts):
        return [[ord(letter) for letter in text.replace("aa", "A")] for text in texts]

    def decode(self, ids):
        return ["".join(map(chr, each)).replace("A", "aa") for each in ids]

    def chat(self, texts):
        return self.encode([f"<{text}>" for text in texts])


def made(name: str, count: int = 6, seed: int = 0, *, chat: bool = False, **options) -> list[DatasetSample]:
    return load(DatasetConfig(dataset_name=name, **options), Bytes(), count, seed, chat)


def write(tmp_path, lines) -> str:
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(file)


def test_texts_have_as_many_tokens_as_wanted():
    wanted = [[97] * 40, [97, 98] * 20, [99]]
    found = make_texts(Bytes(), wanted, random.Random(0))
    assert [len(ids) for _, ids in found] == [40, 40, 1]
    assert all(Bytes().encode([text]) == [ids] for text, ids in found)


def test_random_lengths_leave_room_for_special_tokens():
    samples = made("random", random_input_len=21, random_output_len=7, random_prefix_len=3)
    assert {(len(s.prompt_ids), s.output_len) for s in samples} == {(23, 7)}
    assert len({s.text[:3] for s in samples}) == 1 and len({s.text for s in samples}) == 6
    assert samples == made("random", random_input_len=21, random_output_len=7, random_prefix_len=3)
    assert samples != made("random", seed=1, random_input_len=21, random_output_len=7, random_prefix_len=3)


def test_random_ranges():
    ratio = '{"input": 0.5, "output": 0.9}'
    samples = made("random", 300, random_input_len=11, random_output_len=2, random_range_ratio=ratio)
    assert {len(s.prompt_ids) for s in samples} == set(range(5, 16)) and {s.output_len for s in samples} == {1, 2, 3, 4}
    with pytest.raises(ConfigError, match="random_range_ratio"):
        DatasetConfig(random_range_ratio="1")
    with pytest.raises(ConfigError, match="random_input_len is too small"):
        made("random", random_input_len=1)


def test_prefixes_are_repeated():
    lengths = {
        "prefix_repetition_prefix_len": 9,
        "prefix_repetition_suffix_len": 4,
        "prefix_repetition_num_prefixes": 3,
    }
    samples = made("prefix_repetition", 13, prefix_repetition_output_len=5, **lengths)
    assert (
        len(samples) == 12 and {len(s.prompt_ids) for s in samples} == {13} and {s.output_len for s in samples} == {5}
    )
    assert len({tuple(s.prompt_ids[:9]) for s in samples}) == 3 and len({s.text for s in samples}) == 12
    with pytest.raises(ConfigError, match="num_prefixes"):
        made("prefix_repetition", 2, **lengths)


def test_sharegpt_takes_the_first_question_and_the_length_of_its_answer(tmp_path):
    talks = [("what is it", "a bee"), ("no", "too short a question"), ("long " * 300, "too long"), ("which one", "abc")]
    entries = [{"conversations": [{"value": a}, {"value": b}, {"value": "more"}]} for a, b in talks]
    file = tmp_path / "share.json"
    file.write_text(json.dumps([*entries, {"conversations": [{"value": "alone"}]}, {"id": 1}]))
    options = {"dataset_path": str(file), "disable_shuffle": True}
    assert [(s.text, s.output_len) for s in made("sharegpt", oversample=False, **options)] == [("what is it", 5)]
    fixed = made("sharegpt", oversample=False, sharegpt_output_len=9, **options)
    assert [(s.text, s.output_len) for s in fixed] == [("what is it", 9), ("which one", 9)]
    assert len(made("sharegpt", 5, **options)) == 5, "repeated"


def test_custom_lines(tmp_path):
    path = write(tmp_path, [{"prompt": "one", "output_tokens": 3}, {"prompt": "two", "output_tokens": 4}])
    options = {"dataset_path": path, "disable_shuffle": True, "oversample": False}
    assert [(s.text, s.output_len) for s in made("custom", **options)] == [("one", 256), ("two", 256)]
    assert [s.output_len for s in made("custom", custom_output_len=-1, **options)] == [3, 4]
    bad = write(tmp_path, [{"prompt": "one"}])
    with pytest.raises(ConfigError, match="output_tokens in every line"):
        made("custom", dataset_path=bad, custom_output_len=-1)
    with pytest.raises(ConfigError, match="has no prompt"):
        made("custom", dataset_path=write(tmp_path, [{"text": "one"}]))


def test_a_trace_shares_what_its_hashes_share(tmp_path):
    lines = [
        {"timestamp": 2000, "input_length": 10, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 3500, "input_length": 12, "output_length": 4, "hash_ids": [1, 9]},
        {"timestamp": 3600, "input_length": 2, "output_length": 5},
    ]
    options = {"timed_trace_chunk_hash_size": 4, "timed_trace_sec_multiplier": 0.001}
    samples = made("timed_trace", dataset_path=write(tmp_path, lines), **options)
    assert [(len(s.prompt_ids), s.output_len, s.text) for s in samples] == [(10, 3, None), (12, 4, None), (2, 5, None)]
    assert [s.at_s for s in samples] == pytest.approx([0.0, 1.5, 1.6])
    first, second, _ = (s.prompt_ids for s in samples)
    assert first[:4] == second[:4] and first[4:8] != second[4:8]
    with pytest.raises(ConfigError, match="openai-chat does not support token ids"):
        made("timed_trace", chat=True, dataset_path=write(tmp_path, lines))
    with pytest.raises(ConfigError, match="line 1 of"):
        made("timed_trace", dataset_path=write(tmp_path, [{"timestamp": 1}]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dataset_name": "custom"}, "needs dataset_path"),
        ({"dataset_name": "random", "dataset_path": "x"}, "takes no dataset_path"),
        ({"dataset_name": "random", "self_timed": True}, "self_timed"),
        ({"custom_output_len": 0}, "custom_output_len"),
        ({"timed_trace_chunk_hash_size": 0}, "timed_trace_chunk_hash_size"),
    ],
)
def test_options_that_make_no_sense(options, told):
    with pytest.raises(ConfigError, match=told):
        DatasetConfig(**options)


@pytest.mark.parametrize("content", ["", "{", "[1]", b"\xff"])
def test_files_that_are_of_no_use(tmp_path, content):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("custom", "timed_trace", "sharegpt"):
        with pytest.raises(ConfigError, match="dataset_path"):
            made(name, dataset_path=str(file))


def test_arrivals_end_when_the_rate_says():
    config = OpenLoopConfig(workload="gamma", rate=4.0)
    times = arrival_times(config, 20)
    assert times == sorted(times) and times[-1] == pytest.approx(5.0) and times == arrival_times(config, 20)
    assert arrival_times(OpenLoopConfig(), 3) == [0.0, 0.0, 0.0]


def test_rates_rise():
    line, factors = Ramp("linear", 1, 5), Ramp("exponential", 1, 16)
    assert [line.rate(i, 5) for i in range(5)] == [1, 2, 3, 4, 5]
    assert [factors.rate(i, 5) for i in range(5)] == [1, 2, 4, 8, 16]
    times = arrival_times(OpenLoopConfig(workload="uniform", burstiness=1.0), 5, line)
    assert times == pytest.approx([1, 1.5, 1.5 + 1 / 3, 1.75 + 1 / 3, 1.95 + 1 / 3])


def test_a_plan_has_classes_and_schemas_and_times():
    samples = [DatasetSample([1], 4, "a", at_s) for at_s in (2.0, 1.0)]
    classes = [LoadClass("fast", ttft_s=1.0)]
    planned = plan(OpenLoopConfig(schema_share=1.0), samples, classes)
    assert [(p.number, p.at_s, p.slo.name, p.text) for p in planned] == [(1, 1.0, "fast", "a"), (0, 2.0, "fast", "a")]
    assert all(p.schema is not None for p in planned)
    with pytest.raises(ConfigError, match="need dataset_name ids"):
        plan(OpenLoopConfig(), samples, [LoadClass("long", prompts=(1, 2))])
