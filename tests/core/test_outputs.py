"""Counters of an engine across restarts."""

from roseinfer.core.outputs import GuideStats, OffloadStats, PolicyStats, SchedulerStats, carry_counters

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
        if name not in ("guides", "offload"):
            earlier = 0 if name in NOW else getattr(before, name)
            assert getattr(after, name) == (getattr(now, name) if name in NOW else earlier + getattr(now, name)), name
    assert carry_counters(SchedulerStats(requests=3), SchedulerStats(requests=4)).requests == 7
    assert after.guides is not None and before.guides is not None and now.guides is not None
    for name in GuideStats._fields:
        earlier = 0 if name in GUIDES_NOW else getattr(before.guides, name)
        assert getattr(after.guides, name) == earlier + getattr(now.guides, name), name


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
