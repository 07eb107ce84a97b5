"""Table and JSON of `bench serve`, compared with those of `vllm bench serve`."""

import json

import pytest

from roseinfer.bench.open_loop import LoadOutcome
from roseinfer.bench.serve_config import ResultConfig
from roseinfer.bench.serve_result import as_table, file_name, prepare_folder, result, save
from roseinfer.core.errors import ConfigError

TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     2         
Failed requests:                         2         
Maximum request concurrency:             64        
Request rate configured (RPS):           10.00     
Benchmark duration (s):                  8.00      
Total input tokens:                      20        
Total generated tokens:                  4         
Request throughput (req/s):              0.25      
Request goodput (req/s):                 0.12      
Output token throughput (tok/s):         0.50      
Peak output token throughput (tok/s):    2.00      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          3.00      
---------------Time to First Token----------------
Mean TTFT (ms):                          1000.00   
Median TTFT (ms):                        1000.00   
P99 TTFT (ms):                           1490.00   
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          750.00    
Median TPOT (ms):                        750.00    
P99 TPOT (ms):                           750.00    
---------------Inter-token Latency----------------
Mean ITL (ms):                           750.00    
Median ITL (ms):                         750.00    
P99 ITL (ms):                            995.00    
=================================================="""


def outcome(number: int, start_s: float, end_s: float, chunk_s: list[float], **more) -> LoadOutcome:
    answered = {"status": 200, "ok": True, "output_tokens": len(chunk_s), "text": "hi"}
    return LoadOutcome(number, 10, 3, start_s=start_s, end_s=end_s, chunk_s=chunk_s, **{**answered, **more})


OUTCOMES = [
    outcome(0, 1.0, 3.0, [0.5, 1.0, 2.0], due_s=0.5),
    outcome(1, 2.0, 5.0, [1.5]),
    outcome(2, 1.0, 9.0, [0.1], ok=False, error="cut off"),
    outcome(3, 1.0, 2.0, [], ok=False, status=429, error="no", code="slo_unattainable", cause="seats"),
]
ASKED = {"max_concurrency": 64, "request_rate": 10.0}


def test_the_table_is_that_of_vllm():
    """Check a request of one token, which meets any limit of TPOT and does not count in its mean."""
    report = ResultConfig(goodput=("ttft:1500", "tpot:700"))
    assert as_table({**ASKED, **result(OUTCOMES, report)}, report) == TABLE


def test_what_was_not_asked_for_is_not_printed():
    report = ResultConfig(percentile_metrics="e2el,client_queue_time", metric_percentiles="50,99.9")
    probes = [outcome(0, 0.0, 1.0, [0.25]), outcome(1, 0.0, 1.0, [], ok=False)]
    lines = as_table({"max_concurrency": None, "request_rate": "inf", **result(OUTCOMES, report, probes)}, report)
    assert "concurrency:" not in lines and "configured" not in lines and "goodput" not in lines
    assert "P99.9 E2EL (ms):                         1999.50   " in lines
    assert "Median probe E2EL (ms):                  250.00    " in lines
    assert "Mean Client Queue Time (ms):             1250.00   " in lines


def test_keys_of_the_json():
    found = result(OUTCOMES, ResultConfig())
    assert list(found) == [
        *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
        *("request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts"),
        *("itls", "latencies", "start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s"),
        *("max_concurrent_requests", "rtfx", "cut_off", "refused"),
        *(f"{what}_{name}_ms" for name in ("ttft", "tpot", "itl") for what in ("mean", "median", "std", "p99")),
    ]
    assert found["request_goodput"] is None and found["queue_times"][0] == 0.5
    assert (found["cut_off"], found["refused"]) == (1, {"429 slo_unattainable (seats)": 1})
    assert found["itls"][0] == [0.5, 1.0] and found["latencies"] == [2.0, 1.5, 0.1, 0.0]
    assert found["output_lens"] == [3, 1, 0, 0] and found["errors"] == ["", "", "cut off", "no"]


def test_tokens_of_merged_chunks_count_for_the_peak():
    merged = outcome(0, 0.0, 1.0, [0.2, 0.4], output_tokens=9, chunk_tokens=[1, 8])
    assert result([merged], ResultConfig())["max_output_tokens_per_s"] == 9


NAMED = {
    "label": None,
    "backend": "openai",
    "request_rate": "inf",
    "max_concurrency": None,
    "model_id": "org/model",
    "date": "20260102-030405",
}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "openai-infqps-model-20260102-030405.json"),
        ({"label": "x", "request_rate": 4.0, "max_concurrency": 8}, "x-4.0qps-concurrency8-model-20260102-030405.json"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9},
            "openai-ramp-up-linear-1qps-9qps-model-20260102-030405.json",
        ),
    ],
)
def test_file_names(more, name):
    assert file_name({**NAMED, **more}) == name


def test_details_are_kept_on_request_and_results_appended(tmp_path):
    found = {**NAMED, **result(OUTCOMES, ResultConfig())}
    folder = str(tmp_path / "new")
    prepare_folder(ResultConfig(result_dir=folder))
    path = save(found, ResultConfig(result_dir=folder, save_result=True))
    kept = json.loads(path.read_text())
    assert path.name == file_name(NAMED) and "latencies" in kept and "queue_times" in kept
    assert not {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"} & set(kept)
    more = ResultConfig(result_dir=folder, result_filename="r.json", append_result=True, save_detailed=True)
    save(found, more)
    one, two = save(found, more).read_text().splitlines()
    assert one == two and json.loads(one)["generated_texts"] == ["hi"] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"goodput": ("itl:5",)},
        {"goodput": ("ttft:-1",)},
        {"goodput": ("ttft",)},
        {"percentile_metrics": "ttft,speed"},
        {"metric_percentiles": "101"},
        {"metadata": ("a",)},
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ResultConfig(**options)
