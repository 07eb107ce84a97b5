"""Counters of an engine across restarts."""

from roseinfer.core.outputs import (
    AdapterStats,
    DraftRun,
    DraftStats,
    DraftTally,
    GuideStats,
    OffloadStats,
    PolicyStats,
    SchedulerStats,
    StateStats,
    accepted_of,
    carry_counters,
    sum_stats,
)

# What is true now, and no count of what has happened.
NOW = {"running", "waiting", "blocks_used", "blocks_total", "step_tokens", "step_duration_s", "policy", "guides"} | {
    "step_rows"
}
GUIDES_NOW = {"grammars", "waiting", "mask_s"}
OFFLOAD_NOW = {"blocks_used", "blocks_total", "waiting"}


def test_every_count_goes_on_and_the_rest_is_of_now() -> None:
    before = SchedulerStats(*range(100, 113), PolicyStats(0.5), *range(114, 117), GuideStats(*range(200, 208)))
    now = SchedulerStats(*range(13), PolicyStats(0.7), *range(14, 17), GuideStats(*range(8)))
    after = carry_counters(before, now)
    for name in SchedulerStats._fields:
        if name not in ("guides", "offload", "drafts", "states", "adapters"):
            earlier = 0 if name in NOW else getattr(before, name)
            assert getattr(after, name) == (getattr(now, name) if name in NOW else earlier + getattr(now, name)), name
    assert carry_counters(SchedulerStats(requests=3), SchedulerStats(requests=4)).requests == 7
    assert after.guides is not None and before.guides is not None and now.guides is not None
    for name in GuideStats._fields:
        earlier = 0 if name in GUIDES_NOW else getattr(before.guides, name)
        assert getattr(after.guides, name) == earlier + getattr(now.guides, name), name


def test_snapshots_go_on_and_slots_are_of_now() -> None:
    counted = {"taken", "skipped", "loaded", "stored"}
    before, now = StateStats(*range(1, 10)), StateStats(*range(40, 49))
    after = carry_counters(SchedulerStats(states=before), SchedulerStats(states=now)).states
    added = StateStats(*map(sum, zip(before, now, strict=True)))
    assert after == now._replace(**{name: getattr(added, name) for name in counted})
    assert carry_counters(SchedulerStats(), SchedulerStats(states=now)).states == now
    left = StateStats(**{name: getattr(before, name) for name in counted})
    assert carry_counters(SchedulerStats(states=before), SchedulerStats()).states == left
    assert sum_stats([SchedulerStats(states=before), SchedulerStats(), SchedulerStats(states=now)]).states == added


def test_copies_and_reads_of_adapters_go_on() -> None:
    before, now = AdapterStats(1, 2, 3, 4, 50, 60, 70, 80, 9.0), AdapterStats(5, 6, 7, 8, 9, 10, 11, 12, 1.0)
    stats = SchedulerStats(adapters=before), SchedulerStats(adapters=now)
    assert carry_counters(*stats).adapters == (5, 6, 7, 8, 59, 70, 81, 92, 10.0)
    assert carry_counters(stats[0], SchedulerStats()).adapters == (0, 0, 0, 0, 50, 60, 70, 80, 9.0)
    assert sum_stats([*stats, SchedulerStats()]).adapters == (6, 8, 10, 12, 59, 70, 81, 92, 10.0)


def test_what_went_to_and_came_from_host_memory_goes_on() -> None:
    before, now = OffloadStats(*range(100, 109)), OffloadStats(*range(9))
    after = carry_counters(SchedulerStats(offload=before), SchedulerStats(offload=now)).offload
    assert after is not None
    for name in OffloadStats._fields:
        earlier = 0 if name in OFFLOAD_NOW else getattr(before, name)
        assert getattr(after, name) == earlier + getattr(now, name), name
    assert carry_counters(SchedulerStats(), SchedulerStats(offload=now)).offload == now
    assert carry_counters(SchedulerStats(offload=before), SchedulerStats()).offload == before._replace(
        blocks_used=0, blocks_total=0, waiting=0
    )


def test_guides_that_were_there_only_before_or_only_now() -> None:
    guided = SchedulerStats(guides=GuideStats(compiled=3, grammars=2))
    assert carry_counters(guided, SchedulerStats()).guides == GuideStats(compiled=3)
    assert carry_counters(SchedulerStats(), guided).guides == guided.guides


def test_drafts_add_up_by_proposer_over_engines_and_restarts() -> None:
    one = SchedulerStats(drafts=(DraftStats("ngram", 3, (3, 2), (2, 1)), DraftStats("suffix", 1, (1,), (0,))))
    two = SchedulerStats(drafts=(DraftStats("suffix", 2, (2, 2, 1), (2, 1, 0)),))
    both = (DraftStats("ngram", 3, (3, 2), (2, 1)), DraftStats("suffix", 3, (3, 2, 1), (2, 1, 0)))
    none = SchedulerStats()
    assert sum_stats([one, none, two]).drafts == both
    assert carry_counters(one, two).drafts == both
    assert carry_counters(one, none).drafts == carry_counters(none, one).drafts == one.drafts
    assert sum_stats([none, none]).drafts == ()


def test_right_drafts_are_the_first_ones_of_a_row() -> None:
    row = (DraftRun("grammar", 2), DraftRun("ngram", 3))
    for kept, accepted in ((1, (0, 0)), (2, (1, 0)), (4, (2, 1)), (6, (2, 3))):
        tallies = [("grammar", DraftTally(2, accepted[0])), ("ngram", DraftTally(3, accepted[1]))]
        assert list(accepted_of(row, kept)) == tallies
