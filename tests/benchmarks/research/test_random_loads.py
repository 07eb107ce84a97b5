"""Random loads: equal for all policies, uniform over the lists, and feasible for the machine."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.research import random_loads
from benchmarks.research.choices import Choices, describe, draw_choices, kinds_of, space
from benchmarks.research.random_loads import RandomLoad, TraceNeededError, draw_load, floors
from roseinfer.core.errors import ConfigError

DRAWS = 600


def load_where(**wanted: object) -> RandomLoad:
    """Return the first load with these choices that needs no trace."""
    for number in range(3000):
        choices = draw_choices(1, number)
        if not choices.trace_files and all(choices.of_load[name] == value for name, value in wanted.items()):
            return draw_load(1, number)
    raise AssertionError(f"no load with {wanted}")


def test_a_draw_is_the_same_each_time_and_another_for_another_number_or_seed() -> None:
    one = load_where(hints={"kind": "shuffled"})
    again = draw_load(one.seed, one.number)
    assert again == one
    assert draw_choices(1, 7) != draw_choices(1, 8)
    assert draw_choices(1, 7) != draw_choices(2, 7)


def test_every_entry_of_a_list_is_as_likely_as_any_other() -> None:
    """Chi squared over the entries, at a level that one list in 10,000 would exceed by chance."""
    drawn = [draw_choices(3, number) for number in range(DRAWS)]
    for name in ("machine", "lengths", "arrivals", "hints", "kv", "noise", "stalls", "slowdown"):
        entries = [str(entry) for entry in space()["load_choices"][name]]
        counts, found = Counter(entries), Counter(str(choices.of_load[name]) for choices in drawn)
        assert found.keys() <= counts.keys()
        expected = {entry: DRAWS * copies / len(entries) for entry, copies in counts.items()}
        chi = sum((found[entry] - wanted) ** 2 / wanted for entry, wanted in expected.items())
        assert chi < 37, name


def test_load_is_log_uniform() -> None:
    loads = sorted(draw_choices(4, number).load for number in range(DRAWS))
    low, high = space()["load"]
    assert low <= loads[0] and loads[-1] <= high
    assert loads[DRAWS // 2] == pytest.approx((low * high) ** 0.5, rel=0.1)


def test_somebody_is_always_promised_something() -> None:
    for number in range(DRAWS):
        assert {chosen["objectives"] for chosen in draw_choices(5, number).of_classes} != {"none"}


def test_objectives_are_no_tighter_than_the_floors() -> None:
    """An A100 computes prompts of up to 7,000 tokens in two thirds of a second."""
    for number in range(3000):
        choices = draw_choices(1, number)
        first = choices.of_classes[0]
        if choices.of_load["machine"] == "A" and first["prompts"] == {"law": "uniform", "low": 3000, "high": 7000}:
            if first["objectives"] != "both" or first["ttft_s"] > 0.5 or choices.trace_files:
                continue
            slo = draw_load(1, number).classes[0].slo
            break
    assert slo.ttft_s == pytest.approx(1.5 * (4 * 17.5e-3 + 6960 * 85e-6) * draw_slowness(choices), rel=0.01)
    assert slo.tpot_s >= first["tpot_ms"] / 1e3


def draw_slowness(choices: Choices) -> float:
    """Return the machine's initial slowdown."""
    slowdown = choices.of_load["slowdown"]
    return slowdown["factor"] if slowdown["at"] == 0.0 else 1.0


def test_floors_are_multiples_of_what_a_request_takes_alone() -> None:
    machine = replace(load_where(machine="A").machine, slowdown=())
    found = floors(4096, 101, machine, 2048)
    prefill_s = 2 * 17.5e-3 + 4096 * 85e-6
    step_s = 17.5e-3 + 70e-6 + 0.16e-6 * 4096
    assert found["ttft_s"] == pytest.approx(1.5 * prefill_s)
    assert found["tpot_ms"] == pytest.approx(1.2 * step_s)
    assert found["e2e_s"] == pytest.approx(2 * (prefill_s + 100 * (step_s + 0.16e-6 * 50.5)))
    slower = floors(4096, 101, replace(machine, slowdown=((0.0, 1.2),)), 2048)
    assert slower["ttft_s"] == pytest.approx(1.2 * found["ttft_s"])


def test_every_request_fits_the_machine_however_few_blocks_it_has() -> None:
    load = load_where(kv=0.1, machine="A")
    longest = max(len(arrival.prompt_ids) + arrival.output_len for arrival in load.arrivals)
    assert longest <= load.machine.max_model_len <= load.machine.num_blocks * load.machine.block_size
    assert load.machine.num_blocks < 0.2 * space()["machines"]["A"]["num_kv_blocks"]


def test_the_rate_is_the_load_times_the_capacity() -> None:
    load = load_where(arrivals={"process": "poisson"}, machine="H")
    assert load.rate == pytest.approx(load.choices.load * load.capacity)
    assert len(load.arrivals) / load.arrivals[-1].at_s == pytest.approx(load.rate, rel=0.25)


def test_what_clients_say_is_hinted_and_what_a_predictor_says_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_loads, "space", lambda: {**space(), "requests": 30, "long_requests": 15})
    said = {}
    for kind in space()["load_choices"]["hints"]:
        load = load_where(hints=kind)
        said[kind["kind"], kind.get("tenant")] = {
            (a.predicted_len is not None, a.hinted, a.tenant) for a in load.arrivals
        }
    assert said == {
        ("absent", None): {(False, False, "")},
        ("exact", None): {(True, False, "")},
        ("noisy", None): {(True, False, "")},
        ("factor", None): {(True, True, "")},
        ("shuffled", None): {(True, True, "")},
        ("liars", "own"): {(True, True, ""), (True, True, "liars")},
        ("liars", "shared"): {(True, True, "")},
    }


def test_liars_say_a_tenth() -> None:
    load = load_where(hints=space()["load_choices"]["hints"][6])
    liars = [arrival for arrival in load.arrivals if arrival.tenant == "liars"]
    assert len(liars) / len(load.arrivals) == pytest.approx(0.2, abs=0.08)
    assert all(arrival.predicted_len == max(1, round(arrival.output_len / 10)) for arrival in liars)


def test_kinds_name_what_makes_a_load_not_stationary() -> None:
    plain = {"noise": 0.03, "stalls": {"every_s": 0.0, "lasts_s": 0.0}, "slowdown": {"at": 0.0, "factor": 1.0}}
    plain |= {"kv": 1.0, "hints": {"kind": "shuffled"}, "arrivals": {"process": "gamma", "cv": 8.0}}
    choices = draw_choices(1, 0)
    assert kinds_of(replace(choices, of_load=plain)) == ("stationary",)
    other = {"noise": 0.1, "stalls": {"every_s": 5.0, "lasts_s": 0.1}, "slowdown": {"at": 0.5, "factor": 1.3}}
    other |= {"kv": 0.5, "hints": {"kind": "liars"}, "arrivals": {"process": "onoff"}}
    assert kinds_of(replace(choices, of_load=other)) == ("noise", "stalls", "slowdown", "bursts", "kv", "lying")
    traced = {**plain, "arrivals": {"process": "trace", "file": "x.csv"}}
    assert kinds_of(replace(choices, of_load=traced)) == ("trace",)


def test_a_load_that_needs_a_trace_says_so(tmp_path: Path) -> None:
    number = next(number for number in range(100) if draw_choices(1, number).trace_files)
    with pytest.raises(TraceNeededError, match="no directory"):
        draw_load(1, number)
    with pytest.raises(TraceNeededError, match="does not hold"):
        draw_load(1, number, traces=tmp_path)
    assert issubclass(TraceNeededError, ConfigError)


def test_a_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    for name in ("code", "conv"):
        rows = [f"2023-11-16 18:17:{i // 20:02d}.{5 * (i % 20):02d},{100 + i % 50},{10 + i % 7}" for i in range(1000)]
        text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
        (tmp_path / f"AzureLLMInferenceTrace_{name}.csv").write_text(text)
    number = next(
        number
        for number in range(1000)
        if draw_choices(1, number).of_load["arrivals"]["process"] == "trace"
        and draw_choices(1, number).of_classes[0]["prompts"]["law"] == "trace"
    )
    load = draw_load(1, number, traces=tmp_path)
    times = [arrival.at_s for arrival in load.arrivals]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(load.rate, rel=0.05)
    first = [len(a.prompt_ids) for a in load.arrivals if not a.slo or a.slo.class_name == "1"]
    assert any(100 <= length < 150 for length in first)


def test_a_description_says_what_was_drawn() -> None:
    lists = space()["load_choices"]
    of_load = {
        "machine": "A",
        "lengths": "own",
        "arrivals": lists["arrivals"][5],
        "hints": lists["hints"][6],
        "kv": 0.1,
    }
    of_load |= {"noise": 0.1, "stalls": lists["stalls"][5], "slowdown": lists["slowdown"][5]}
    first = {"share": 1, "objectives": "both", "ttft_s": 0.5, "tpot_ms": 22, "e2e_s": 5.0}
    first |= {"prompts": {"law": "fixed", "value": 128}, "outputs": space()["class_choices"]["outputs"][6]}
    second = {**first, "share": 3, "objectives": "none"}
    assert describe(Choices(1.5, of_load, [first, second])) == (
        "A x1.50, gamma 8, hints liars 0.2 0.1 195 own, kv 0.1, noise 0.1, stalls 1s/20s, slower 1.3 from 0.5"
        " | 25% 0.5s/22ms fixed-128>trace conv; 75% best effort fixed-128>trace conv"
    )
    shared = describe(Choices(1.5, {**of_load, "lengths": "shared"}, [first, second]))
    assert shared.endswith(" | 25% 0.5s/22ms; 75% best effort; fixed-128>trace conv")
