"""benchmarks/bounds.py: counts and simulation against sums by hand and the figures stated for the rows."""

from dataclasses import replace

import pytest

from benchmarks import bounds, gpu_rows
from benchmarks.model_cost import Chunk, ModelCost, WindowCost, Work
from roseinfer.bench.arrivals import PlannedRequest, draw
from roseinfer.core.runner import ExpertChoice
from tests.helpers.cases import cases

# 1 byte of K/V a token, 100 bytes of weights; attention costs nothing.
COST = ModelCost(layer_weights=90, head_weights=10, weight_itemsize=1, kv_token_bytes=1, attention_width=0)


@pytest.fixture(scope="module")
def rows():
    return {row.key: row for row in bounds.ROWS}


def slow_reads():
    """100 bytes a second of weights and of K/V; arithmetic costs nothing."""
    return bounds.Rates("test", ((1, 100.0),), 100.0, 1e18, 1e18)


def planned(number: int, at_s: float, prompt: int, output: int) -> PlannedRequest:
    return PlannedRequest(number, at_s, list(range(prompt)), output)


def test_rate_of_reading_weights():
    rates = bounds.Rates("x", ((1, 4.0), (16, 3.0), (64, 2.0)), 1.0, 1.0, 1.0)
    assert [rates.weight_bytes_s(tokens) for tokens in (1, 4, 16, 32, 64, 500)] == [4.0, 3.5, 3.0, 2.5, 2.0, 2.0]


def test_a_step_is_products_then_attention():
    rates = bounds.Rates("x", ((1, 10.0),), 5.0, 100.0, 50.0)
    assert rates.step_s(Work(1, weight_bytes=20, kv_bytes=5, linear_flops=100, attention_flops=25)) == 2 + 1
    assert rates.step_s(Work(1, weight_bytes=20, kv_bytes=5, linear_flops=500, attention_flops=500)) == 5 + 10


def test_one_request():
    """Prefill reads the weights and 4 tokens and writes 4: 1.08 s. Decoding at contexts 4, 5: 1.06 and 1.07 s."""
    figures = bounds.simulate(COST, slow_reads(), 100, [planned(0, 5.0, 4, 3)])
    assert figures["ttft_p50_ms"] == pytest.approx(1080)
    assert figures["tpot_p50_ms"] == pytest.approx((1060 + 1070) / 2) and figures["itl_p99_ms"] == pytest.approx(1070)
    assert figures["output_tok_s"] == pytest.approx(3 / (1.08 + 1.06 + 1.07))


def test_a_window_bounds_what_is_read():
    """Layers of 10 bytes a token and a window of 3 read 1, 2, 2 and 2 tokens of the contexts 1 to 4, and their own."""
    cost = replace(COST, windows=(WindowCost(3, 10, 0),))
    load = [planned(0, 0.0, 1, 5), planned(1, 1000.0, 4, 3)]
    figures = bounds.simulate(cost, slow_reads(), 100, load)
    steps_s = [1 + (context + 2) / 100 + 10 * (min(context, 2) + 2) / 100 for context in (1, 2, 3, 4)]
    assert steps_s[2] - steps_s[1] == pytest.approx(0.01)
    tpot_ms = [1e3 * sum(steps_s) / 4, 1e3 * (1.46 + 1.47) / 2]
    assert figures["tpot_p50_ms"] == pytest.approx(sum(tpot_ms) / 2)


def test_two_requests_share_the_weights():
    """The second arrives during the first's prefill and is computed beside its decode: 1 + 0.06 + 0.04 s."""
    load = [planned(0, 0.0, 4, 2), planned(1, 0.5, 2, 1)]
    figures = bounds.simulate(COST, slow_reads(), 100, load)
    assert figures["ttft_p99_ms"] == pytest.approx(1080 + 0.99 * (1080 + 1100 - 500 - 1080))
    assert figures["tpot_p99_ms"] == pytest.approx(0.99 * 1100)
    assert figures["output_tok_s"] == pytest.approx(3 / 2.18)


def test_a_budget_splits_prompts():
    """3 + 1 tokens: the head is read for the second part only."""
    figures = bounds.simulate(COST, slow_reads(), 3, [planned(0, 0.0, 4, 1)])
    assert figures["ttft_p50_ms"] == pytest.approx(900 + 60 + 1000 + 50)


def test_a_shared_prompt_is_computed_once():
    """The other requests then compute their last token in one step: each reads 4 and writes 1."""
    load = [planned(i, 0.0, 4, 1) for i in range(3)]
    figures = bounds.simulate(COST, slow_reads(), 100, load, shared=4)
    assert figures["ttft_p50_ms"] == pytest.approx(1080 + 1000 + 2 * 50)


def test_a_shared_prefix_is_computed_once():
    """The other requests compute the 2 tokens after it: each reads 4 and writes 2."""
    load = [planned(i, 0.0, 4, 1) for i in range(3)]
    figures = bounds.simulate(COST, slow_reads(), 100, load, shared=2)
    assert figures["ttft_p50_ms"] == pytest.approx(1080 + 1000 + 2 * 60)


def test_eight_bits_are_half_the_bytes():
    """Except for the output head. Products in FP8 have a limit of their own."""
    wide, narrow = (bounds.model_cost(name) for name in ("qwen3-8b", "qwen3-8b-fp8-kv"))
    assert narrow.kv_token_bytes * 2 == wide.kv_token_bytes
    assert narrow.counted(1, 1).weight_bytes == wide.layer_weights + 2 * wide.head_weights
    (card,) = bounds.all_rates("qwen3-8b-fp8")
    assert card.name == "card" and card.matrix_flops_s > bounds.CARD.matrix_flops_s


def test_an_idle_engine_waits_for_the_next_arrival():
    figures = bounds.simulate(COST, slow_reads(), 100, [planned(0, 0.0, 4, 1), planned(1, 50.0, 4, 1)])
    assert figures["ttft_p99_ms"] == pytest.approx(1080) and figures["output_tok_s"] == pytest.approx(2 / 51.08)


@pytest.mark.parametrize(
    ("name", "weights_gb", "kv_token_bytes"),
    [("gpt2", 0.247, 36_864), ("qwen3-0.6b", 1.192, 114_688), ("qwen3-8b", 15.14, 147_456)],
)
def test_models(name, weights_gb, kv_token_bytes):
    cost = bounds.model_cost(name)
    assert 2e-9 * (cost.layer_weights + cost.head_weights) == pytest.approx(weights_gb, rel=1e-3)
    assert cost.kv_token_bytes == kv_token_bytes


@pytest.mark.parametrize(("model", "terabytes"), [("qwen3-0.6b", 14.9), ("qwen3-8b", 19.1)])
def test_nano_reads_what_was_stated(rows, model, terabytes):
    """For every token, in whole blocks of 16. The bound counts exact contexts, and no read for the first token."""
    load = draw(rows[f"{model} nano"].load())
    cost = bounds.model_cost(model)
    blocks = sum(
        -(-context // 16)
        for request in load
        for context in range(len(request.prompt_ids), len(request.prompt_ids) + request.output_len)
    )
    assert round(16 * blocks * cost.kv_token_bytes / 1e12, 1) == terabytes
    assert bounds.total_work(cost, load)["decode"].kv_bytes / 1e12 == pytest.approx(0.99 * terabytes, rel=5e-3)


def test_rag_computes_what_was_stated(rows):
    prefill = bounds.total_work(bounds.model_cost("qwen3-8b"), draw(rows["qwen3-8b rag"].load()))["prefill"]
    assert round(prefill.flops / 1e15, 1) == 7.4


def test_bounds_of_the_table(rows):
    """One request at a time: weights, and the K/V of its context, over the bandwidth."""
    cost = bounds.model_cost("qwen3-8b")
    context = 128 + 256 / 2
    step_s = (2 * (cost.layer_weights + cost.head_weights) + context * cost.kv_token_bytes) / 4.27e12
    assert bounds.bound(rows["qwen3-8b seq1"], bounds.CARD)["tpot_p50_ms"] == pytest.approx(1e3 * step_s, rel=1e-3)
    nano = {
        rates.name: bounds.bound(rows["qwen3-8b nano"], rates)["output_tok_s"]
        for rates in (bounds.CARD, bounds.KERNELS)
    }
    assert 10_200 < nano["kernels"] < nano["card"] < 14_000


@cases("model", ["qwen3-8b"], exhaustive=["gpt-oss-20b", "gemma-3-27b"])
def test_every_target_is_possible(model):
    for row in bounds.chosen([model], None):
        limits = bounds.bound(row, bounds.all_rates(row.model)[0])
        for figure, target in row.target.items():
            assert gpu_rows.reached(figure, limits[figure], target), f"{row.key} {figure}"


def test_command(capsys, monkeypatch, tmp_path):
    file = tmp_path / "bounds.json"
    monkeypatch.setattr("sys.argv", ["bounds.py", "--models", "gpt2", "--rows", "hol", "--json", str(file)])
    bounds.main()
    printed = capsys.readouterr().out
    assert "gpt2: 0.25 GB" in printed and "gpt2 hol" in printed and "seq1" not in printed
    assert '"kernels"' in file.read_text()


@pytest.mark.parametrize(("name", "one_row_ms"), [("qwen3.6-27b-fp8", 6.55), ("qwen3.6-35b-a3b-fp8", 0.87)])
def test_floors_of_models_with_states(name, one_row_ms):
    """The floors of 26.9 and 3.5 GB a step, and a state of .3 and .13 GB, at the card's 4.15 TB/s."""
    cost = bounds.model_cost(name)
    work = cost.work([Chunk(128, 1)])
    assert (work.weight_bytes + work.kv_bytes) / 4.15e9 == pytest.approx(one_row_ms, rel=0.03)


def test_experts_are_counted():
    cost = bounds.model_cost("qwen3-30b-a3b")
    assert cost.experts == ExpertChoice(128, 8)
    for tokens, gigabytes in ((1, 6.08), (8, 25.8), (64, 59.5), (256, 60.4)):
        assert cost.counted(tokens, 1).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)
