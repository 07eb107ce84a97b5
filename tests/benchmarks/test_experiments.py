"""benchmarks/experiments.py: its settings are valid, and the slow copies that it compares with are correct."""

import pytest

from benchmarks import experiments
from roseinfer import LLM, SamplingParams

ENGINE = {"threads": 1, "num_kv_blocks": 64, "max_num_seqs": 4}


def texts() -> list[str]:
    """Return the texts of four requests that share a partly filled block and diverge."""
    with LLM("tiny", **ENGINE) as llm:
        params = [SamplingParams(max_tokens=8, seed=seed, ignore_eos=True) for seed in range(4)]
        llm.generate("def add(a, b):", params[0])
        return [answer.outputs[0].text for answer in llm.generate(["def add(a, b):"] * 4, params)]


def test_copies_one_by_one_are_the_same_copies():
    batched = texts()
    with experiments.copies_one_by_one():
        assert texts() == batched
    assert len(set(batched)) > 1


def test_a_comparison_without_copies_is_an_error():
    with pytest.raises(RuntimeError, match="no block was copied"), experiments.copies_one_by_one():
        LLM("tiny", **ENGINE).close()


def test_settings_are_valid():
    for experiment in experiments.EXPERIMENTS:
        for name, own in experiment.settings.items():
            flags = experiments.shlex.split(f"{experiment.flags} {own}")
            made = experiments.setting(name, [*flags, "tiny"], experiment.context)
            assert made.name == name and made.load.params.ignore_eos


def test_run_and_table(tmp_path, capsys):
    small = experiments.Experiment("small", "--num-requests 2 --max-new-tokens 3", {"a": "", "b": "--pretok"}, {})
    flags = ["tiny", "--threads", "1", "--num-kv-blocks", "64", "--max-num-seqs", "4", "--warmup-runs", "0"]
    result = experiments.run(small, flags, tmp_path)
    assert result["a"]["report"]["requests"] == 2 and len(result["b"]["samples"]["ttft_ms"]) == 2
    assert (tmp_path / "small.png").exists()
    printed = capsys.readouterr().out
    assert "a: roseinfer bench streaming --num-requests 2" in printed and "| b |" in printed
