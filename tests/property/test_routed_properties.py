"""Under any sequence of engine failures and restarts, each request ends once, with the output of a single engine."""

import asyncio
from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.cluster.displaced import MAX_WAIT_S, SETTLE_S
from roseinfer.core.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineLostError,
    EngineUnavailableError,
)
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import RequestMeta
from roseinfer.core.slo import Slo
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineState
from roseinfer.router.placer import Placer
from roseinfer.router.view import EngineView
from tests.helpers.cases import examples
from tests.helpers.routed_fleet import MOST_ENGINES, Asked, Fleet, with_fleet

ENGINES = 3
Change = tuple[str, int, int]

engine = st.integers(0, 11)  # of the engines that are up
number = st.integers(0, 7)
KINDS = [
    *("submit", "step", "look") * 3,
    *("die", "fail", "unseen death", "restart", "reconnect", "freeze", "thaw", "drain", "undrain", "cancel", "refuse"),
]
COMINGS = [*("add", "retire") * 2, "unlist"]


def changes(kinds: list[str]) -> st.SearchStrategy[list[Change]]:
    return st.lists(st.tuples(st.sampled_from(kinds), engine, number), min_size=5, max_size=60)


class Story:
    """Driver of changes that checks after each that no request is lost without need."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.asked: list[Asked] = []
        self.losses: Counter[str] = Counter()
        self.blamed: Counter[str] = Counter()
        self.cancelled: set[str] = set()
        self.excused: set[str] = set()  # no other engine was there, or their own failure named them

    async def run(self, changes: list[Change]) -> None:
        for name, which, detail in changes:
            self.fleet.clock.advance(0.01 * detail)
            kept = {id(one): one.reader.ids() for one in self.asked if one.ended}
            there = self.fleet.engines
            if there or name in ("add", "submit", "look"):
                number = there[which % len(there)] if there else 0
                await getattr(self, "_" + name.replace(" ", "_"))(number, detail)
            self._check(kept)

    def _check(self, kept: dict[int, list[int]]) -> None:
        fleet = self.fleet
        live = [one for one in self.asked if not one.ended]
        assert fleet.routed.num_live == fleet.inflight.own == len(live)
        for one in live:
            assert fleet.where(one) is not None or not one.live.has_output, "only requests without output wait"
        for one in self.asked:
            one.check_part()
            if id(one) in kept:
                assert one.reader.ids() == kept[id(one)], "nothing comes behind an end"
        assert list(self._placer().views) == fleet.engines == sorted(fleet.observed.here)

    # --- changes ------------------------------------------------------------------------------------------------
    async def _submit(self, number: int, detail: int) -> None:
        meta = RequestMeta(slo=Slo(ttft_s=0.5)) if detail % 2 else RequestMeta()
        try:
            self.asked.append(self.fleet.submit(1 + detail % 3, meta, max_tokens=1 + detail, seed=None))
        except EngineUnavailableError:
            assert not self._candidates()

    async def _step(self, number: int, detail: int) -> None:
        self.fleet.models[number].step(1 + detail % 3, lambda sample: detail < 4 or sample.index % 2 == detail % 2)

    async def _look(self, number: int, detail: int) -> None:
        """Check for hanging engines. Requests leave them, which counts as a loss of each."""
        fleet = self.fleet
        frozen = {n: self._in(n) for n in fleet.engines if fleet.models[n].frozen and not fleet.models[n].dead}
        fleet.routed.tick()
        for n, here in frozen.items():
            for one in here:
                if fleet.where(one) != n:
                    self._note_loss(one, blamed=n not in fleet.host_lost)

    async def _die(self, number: int, detail: int) -> None:
        if not self.fleet.models[number].dead:
            self._lose(number, lambda: self.fleet.lose(number))

    async def _unseen_death(self, number: int, detail: int) -> None:
        """Stop an engine, and send requests to it before its loss is noticed."""
        model = self.fleet.models[number]
        if not model.dead:
            model.dead, model.samples = True, {}
            await self._submit(number, detail)
            model.dead = False
            self._lose(number, lambda: self.fleet.lose(number))

    async def _fail(self, number: int, detail: int) -> None:
        model = self.fleet.models[number]
        if model.dead or model.frozen:
            return
        suspects = list(model.samples.values())[: detail % 4]
        self._lose(number, lambda: model.fail(*suspects), {sample.add.request_id for sample in suspects})

    async def _restart(self, number: int, detail: int) -> None:
        if self.fleet.models[number].dead:
            await self.fleet.restart(number)

    async def _reconnect(self, number: int, detail: int) -> None:
        model = self.fleet.models[number]
        if not model.dead and not model.frozen:
            self._lose(number, lambda: model.break_off())
            await self.fleet.reconnect(number)

    async def _freeze(self, number: int, detail: int) -> None:
        if not self.fleet.models[number].dead:
            self.fleet.freeze(number, host_lost=detail % 2 == 0)
            self.fleet.models[number].step()
            await self._look(number, detail)

    async def _thaw(self, number: int, detail: int) -> None:
        if self.fleet.models[number].frozen and not self.fleet.models[number].dead:
            self.fleet.thaw(number)

    async def _drain(self, number: int, detail: int) -> None:
        if not self.fleet.models[number].dead and not self.fleet.models[number].frozen:
            self.fleet.stand(number, EngineState.DRAINING)

    async def _undrain(self, number: int, detail: int) -> None:
        if not self.fleet.models[number].dead and not self.fleet.models[number].frozen:
            self.fleet.stand(number, EngineState.READY)

    async def _add(self, number: int, detail: int) -> None:
        if len(self.fleet.models) < MOST_ENGINES:
            number = self.fleet.add()
            self.fleet.promise(number, **PROMISED)
            if detail % 4:
                await self.fleet.reach(number)

    async def _retire(self, number: int, detail: int) -> None:
        self.fleet.routed.retire(number, 0.02 * detail)
        await self._look(number, detail)

    async def _unlist(self, number: int, detail: int) -> None:
        self.fleet.routed.set_listed(number, detail % 3 == 0)

    async def _cancel(self, number: int, detail: int) -> None:
        if detail < len(self.asked) and not self.asked[detail].ended:
            self.cancelled.add(self.asked[detail].request.request_id)
            self.asked[detail].live.cancel()

    async def _refuse(self, number: int, detail: int) -> None:
        model = self.fleet.models[number]
        samples = [sample for sample in model.samples.values() if not sample.ids]
        if samples and not model.dead and not model.frozen:
            sample = samples[detail % len(samples)]
            model.refuse(sample)

    # --- losses -------------------------------------------------------------------------------------------------
    def _candidates(self, *but: int) -> list[EngineView]:
        return self._placer().candidates(self.fleet.clock.now(), but)

    def _placer(self) -> Placer:
        assert self.fleet.routed.placer is not None
        return self.fleet.routed.placer

    def _in(self, number: int) -> list[Asked]:
        return [one for one in self.asked if not one.ended and self.fleet.where(one) == number]

    def _lose(self, number: int, lose: Callable[[], None], suspects: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        fleet = self.fleet
        fleet.routed.reports()  # refreshes the router
        here = self._in(number)
        wire = {one.live.wire_id: one for one in here}
        others = self._candidates(number)
        host_lost = number in fleet.host_lost
        shelter = [endpoint for endpoint in fleet.routed.endpoints if endpoint.number != number and endpoint.usable]
        drained = fleet.routed.endpoints[number].draining and not suspects
        lose()
        fleet.clock.advance(SETTLE_S)
        later = self._candidates(number)
        fleet.routed.place_displaced()
        for wire_id, one in wire.items():
            name = one.request.request_id
            named = wire_id in suspects if suspects else not host_lost
            alone = suspects == {wire_id}
            spent = not drained and (self.losses[name] >= 3 or (named and self.blamed[name] >= 1))
            begun = one.live.has_output
            nowhere = not ((others if drained else later) or (shelter and begun))
            if not (alone or spent) and nowhere and not begun and one.request.prompt.meta.slo is None:
                assert not one.ended, "it waits for an engine"
            elif alone or spent or nowhere:
                lost_request_error = EngineDeadError if begun and not drained else EngineUnavailableError
                expected = EngineLostError if alone or spent else lost_request_error
                assert [type(error) for error in one.reader.errors] == [expected]
            else:
                assert not one.ended and fleet.where(one) != number, "it goes on"
            if not drained:
                self._note_loss(one, blamed=named)

    def _note_loss(self, one: Asked, *, blamed: bool) -> None:
        self.losses[one.request.request_id] += 1
        self.blamed[one.request.request_id] += blamed

    # --- the end ------------------------------------------------------------------------------------------------
    async def end(self) -> None:
        for number, model in enumerate(self.fleet.models):
            if model.frozen and not model.dead:
                self.fleet.thaw(number)
        self.fleet.clock.advance(MAX_WAIT_S)
        self.fleet.routed.tick()
        self.fleet.finish()
        for one in self.asked:
            self._check_end(one)
        self.fleet.routed.tick()
        for endpoint in self.fleet.routed.endpoints:
            assert not endpoint.retiring and (endpoint.listed or endpoint.engine is not None), (
                "who has nothing left to do is gone"
            )

    def _check_end(self, one: Asked) -> None:
        reader = one.reader
        assert one.ended and len(reader.errors) <= 1
        if reader.errors:
            allowed = {EngineLostError, EngineDeadError, EngineUnavailableError}
            if one.request.request_id in self.cancelled:
                allowed.add(EngineClosedError)
            assert type(reader.errors[0]) in allowed
        elif FinishReason.REJECTED not in reader.ends:
            one.check_whole()


PROMISED = {"cost": StepCost(0.001, 1e-6, 1e-6), "free_seats": 64, "free_blocks": 64}


def run(changes: list[Change], *, changing: bool) -> None:
    async def work(fleet: Fleet) -> None:
        for number in fleet.engines:
            fleet.promise(number, **PROMISED)
        story = Story(fleet)
        await story.run(changes)
        await story.end()

    asyncio.run(with_fleet(work, ENGINES, "pace", dynamic=changing))


@given(changes(KINDS))
@examples(100, derandomize=True)
def test_nothing_is_lost_and_nothing_comes_twice(changes: list[Change]) -> None:
    run(changes, changing=False)


@given(changes([*KINDS, *COMINGS]))
@examples(100, derandomize=True)
def test_nor_while_engines_come_and_go(changes: list[Change]) -> None:
    run(changes, changing=True)
