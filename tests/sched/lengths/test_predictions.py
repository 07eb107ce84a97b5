"""Predictions are corrected by the record of their source."""

import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from roseinfer.core.request import Prompt, Request, RequestMeta, Status
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.lengths.estimators import CalibratedLengths, EcdfLengths, make_lengths
from roseinfer.sched.lengths.predictions import (
    MAX_RECORD_PAIRS,
    MAX_TENANTS,
    MIN_KNOWN_PAIRS,
    LengthPair,
    SourceRecord,
    SourceRecords,
    censored,
)
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival, poisson

LAW = SCORPIO_8B.mix.lengths


def lengths_of(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [LAW.draw(rng)[1] for _ in range(count)]


def hint(predicted: int, tenant: str = "", *, hinted: bool = True, max_tokens: int = 4000, **more: bool) -> Request:
    meta = RequestMeta(predicted_len=predicted, hinted=hinted, tenant=tenant)
    return Request(f"{tenant} {predicted}", Prompt([1], SequenceParams(max_tokens=max_tokens, **more), meta))


def alive(kind: type) -> int:
    """Return the number of objects of a class that anything refers to."""
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def taught(pairs: Sequence[tuple[int, int]], tenant: str = "", known: CalibratedLengths | None = None):
    """Teach an estimator with requests of `pairs` (predicted, actual)."""
    known = known or CalibratedLengths(EcdfLengths())
    for predicted, actual in pairs:
        known.finished(hint(predicted, tenant), actual)
    return known


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_factor_that_all_hints_are_wrong_by_is_learnt_from_some_dozens(factor: float) -> None:
    known = taught([(max(1, round(factor * n)), n) for n in lengths_of(48)])
    for n in (50, 300, 1500):
        assert known.total(hint(round(factor * n))) == pytest.approx(n, rel=0.15, abs=5)


def test_what_is_exact_stays_exact() -> None:
    known = taught([(n, n) for n in lengths_of(400)])
    for n in (20, 300, 1500):
        assert known.total(hint(n)) == pytest.approx(n, rel=1e-6)
        assert known.left(hint(n), n // 2) == pytest.approx(n - n // 2, rel=1e-6)


def test_noise_is_worth_the_mean_of_what_has_ended() -> None:
    actual = lengths_of(300)
    said = random.Random(1).sample(actual, len(actual))
    known, mean = taught(list(zip(said, actual, strict=True))), fmean(actual[-MAX_RECORD_PAIRS:])
    for predicted in (30, 100, 300, 1000):
        assert known.total(hint(predicted)) == pytest.approx(mean, rel=0.3)


def test_a_noisy_predictor_errs_less_than_it_did() -> None:
    """Predictions shrink towards the mean: with an error of 195 tokens, by about 10%."""
    known, rng = CalibratedLengths(EcdfLengths()), random.Random(2)
    errors: list[tuple[float, float]] = []
    for n in lengths_of(1500):
        predicted = max(8, round(n + rng.gauss(0, 195) * min(1.0, n / 300 + 0.3)))
        request = hint(predicted, hinted=False)
        errors.append(((known.total(request) - n) ** 2, (predicted - n) ** 2))
        known.finished(request, n)
    later = errors[500:]
    assert fmean(mine for mine, _ in later) < 0.85 * fmean(its for _, its in later)


def test_a_tenant_of_liars_is_known_for_it_and_changes_nothing_for_the_others() -> None:
    honest = [(n, n) for n in lengths_of(60)]
    alone, beside = taught(honest, "honest"), taught(honest, "honest")
    taught([(max(1, n // 10), n) for n in lengths_of(60, 1)], "liars", beside)
    assert beside.total(hint(40, "liars")) == pytest.approx(400, rel=0.15)
    for n in (40, 400):
        assert alone.total(hint(n, "honest")) == pytest.approx(n, rel=0.002)
        assert beside.total(hint(n, "honest")) == pytest.approx(n, rel=0.02)
        assert beside.total(hint(n, hinted=False)) == n, "nor for the server's predictor"


def test_a_new_name_is_believed_as_far_as_other_new_ones_deserved() -> None:
    known = CalibratedLengths(EcdfLengths())
    for i, n in enumerate(lengths_of(100)):
        taught([(max(1, n // 10), n)], f"liar {i}", known)
    assert known.total(hint(40, "another")) > 300


def test_memory_is_bounded_and_new_names_do_not_push_out_who_is_known() -> None:
    before = alive(SourceRecord)
    known = taught([(n, n) for n in lengths_of(MIN_KNOWN_PAIRS)], "old")
    for i in range(3 * MAX_TENANTS):
        taught([(10, 1000)], f"new {i}", known)
    assert alive(SourceRecord) - before == MAX_TENANTS + 2, "and those of the server and of newcomers"
    assert known.total(hint(10, "old")) < 20 < known.total(hint(10, "another"))


def test_a_record_is_bounded() -> None:
    record, pairs = SourceRecord(), lengths_of(MAX_RECORD_PAIRS + 50)
    for n in pairs:
        record.add(n, n)
    assert len(record) == MAX_RECORD_PAIRS


def test_requests_that_ended_otherwise_are_forgotten() -> None:
    known, before = CalibratedLengths(EcdfLengths()), alive(Request)
    for i in range(1000):
        request = hint(100 + i)
        known.total(request)
        request.status = Status.FINISHED
    assert alive(Request) - before < 200


def test_what_its_limit_cut_off_is_no_end() -> None:
    pairs = [(n, n) for n in lengths_of(60)]
    known, before = taught(pairs), taught(pairs)
    for _ in range(50):
        known.finished(hint(1000, max_tokens=100), 100)
        known.finished(hint(50, max_tokens=300, ignore_eos=True), 300)
    assert known.total(hint(1000)) == before.total(hint(1000))
    assert known.total(hint(50)) == before.total(hint(50))


def test_a_cut_off_output_that_was_longer_than_expected_tells_that_much() -> None:
    known = CalibratedLengths(EcdfLengths())
    for _ in range(50):
        known.finished(hint(50, max_tokens=400), 400)
    assert known.total(hint(50)) > 350


def test_what_is_left_of_one_that_outlives_its_hint_is_what_its_source_is_known_for() -> None:
    lies = taught([(max(1, n // 10), n) for n in lengths_of(200)], "liars")
    assert lies.left(hint(50, "liars"), 200) == pytest.approx(300, rel=0.2)
    noise = taught([(100, n) for n in lengths_of(200)])
    longer = [n for n in lengths_of(200) if n > 400]
    assert noise.left(hint(100), 400) == pytest.approx(fmean(longer) - 400, rel=0.6)
    assert noise.left(hint(100), 400) > 1.5 * 0.15 * 400


def test_an_absurd_hint_does_not_spoil_the_others() -> None:
    known = taught([(n, n) for n in lengths_of(100)])
    taught([(2**31, 200)], "", known)
    assert 1 <= known.total(hint(2**31)) <= 4000
    assert known.total(hint(300)) == pytest.approx(300, rel=0.5)


@pytest.mark.parametrize("so_far", [150.0, 300.0, 500.0])
def test_a_request_that_runs_makes_up_for_those_that_ended_sooner(so_far: float) -> None:
    rng = random.Random(0)
    drawn = [n for n in (rng.gauss(300, 100) for _ in range(20_000)) if n > 0]
    ended = [n for n in drawn if n <= so_far]
    length, share = censored(so_far, 300.0, 100.0)
    running = share * (len(drawn) - len(ended))
    assert share == pytest.approx(len(ended) / len(drawn), abs=0.02)
    assert (sum(ended) + running * length) / (len(ended) + running) == pytest.approx(300, rel=0.03)


def at_work(
    said: Sequence[int], actual: Sequence[int], tokens: int
) -> Iterator[tuple[list[LengthPair], list[LengthPair]]]:
    """All start at once; those that ended at each token, and those that run."""
    for t in range(1, tokens):
        pairs = list(zip(said, actual, strict=True))
        yield [LengthPair(x, y) for x, y in pairs if y == t], [LengthPair(x, t) for x, y in pairs if y > t]


def test_the_first_that_end_are_the_short_ones_which_those_that_run_correct() -> None:
    """After as many tokens as half of the outputs have: those that ended are less than half as long as all."""
    actual = lengths_of(400)
    said = random.Random(1).sample(actual, len(actual))
    naive, record = SourceRecord(), SourceRecord()
    for ended, running in at_work(said, actual, 300):
        for pair in ended:
            naive.add(*pair)
            record.add(*pair)
        record.see_running(running)
    mean = fmean(actual)
    assert naive.expected(300) < 0.55 * mean
    assert record.expected(300) == pytest.approx(mean, rel=0.3)


def test_requests_that_cannot_have_ended_yet_confirm_nothing() -> None:
    """All hints are ten times too high; most requests have just begun."""
    record = SourceRecord()
    for n in lengths_of(40):
        record.add(10 * n, n)
        record.see_running([LengthPair(10 * m, 0.05 * m) for m in lengths_of(200, 1)])
    assert record.expected(3000) == pytest.approx(300, rel=0.3)


def test_sources_are_told_apart() -> None:
    records = SourceRecords()
    for n in lengths_of(60):
        records.add(False, "", n, n)
        records.add(True, "", 10 * n, n)
        records.see_running([(True, "", LengthPair(3000, 10)), (False, "", LengthPair(300, 10))])
    assert records.of(False, "").expected(300) == pytest.approx(300, rel=0.01)
    assert records.of(False, "a").expected(300) == pytest.approx(300, rel=0.01), "one predictor for all tenants"
    assert records.of(True, "").expected(3000) == pytest.approx(300, rel=0.15)


def hinting(factor: float | None, rate: float = 11.0, count: int = 600) -> list[Arrival]:
    """Nothing is hinted if `factor` is None."""
    bare = [replace(one, predicted_len=None) for one in SCORPIO_8B.mix.requests(poisson(rate, count, 0), 0)]
    if factor is None:
        return bare
    return [replace(one, predicted_len=round(factor * one.output_len), hinted=True) for one in bare]


def good_share(factor: float | None, count: int) -> float:
    run = simulate(hinting(factor, count=count), scheduler_config(**SCORPIO_8B.scheduler), SCORPIO_8B.machine)
    return fmean(life.good for life in run.lifetimes)


@pytest.mark.exhaustive
def test_hints_that_are_ten_times_too_high_are_worth_having_under_overload() -> None:
    """Closed loop: predictions decide which requests start, and so which ones are learnt from."""
    good = {factor: good_share(factor, 600) for factor in (None, 1.0, 10.0)}
    assert good[10.0] > good[None] + 0.03 and good[10.0] > good[1.0] - 0.05, good


def test_without_predictions_it_is_the_table_of_what_ended() -> None:
    known, plain = make_lengths("classifier"), make_lengths("ecdf")
    bare = Request("a", Prompt([1], SequenceParams(max_tokens=4000)))
    for n in lengths_of(100):
        known.finished(bare, n)
        plain.finished(bare, n)
    assert known.total(bare) == plain.total(bare) and known.left(bare, 200) == plain.left(bare, 200)
