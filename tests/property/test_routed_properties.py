"""Whatever happens to engines, and in whichever order: each request ends once, and says what one engine would have."""

import asyncio
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.core.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineLostError,
    EngineUnavailableError,
)
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import RequestMeta
from roseinfer.core.slo import Slo
from roseinfer.engine.api import EngineState
from roseinfer.router.view import EngineView
from tests.helpers.routed_fleet import Asked, Fleet, with_fleet

ENGINES = 3
Change = tuple[str, int, int]

engine = st.integers(0, ENGINES - 1)
number = st.integers(0, 7)
KINDS = [
    *("submit", "step", "look") * 3,
    *("die", "fail", "unseen death", "restart", "reconnect", "freeze", "thaw", "drain", "undrain", "cancel", "refuse"),
]
changes = st.lists(st.tuples(st.sampled_from(KINDS), engine, number), min_size=5, max_size=60)


class Story:
    """Carries changes out, and checks after each that nothing is lost that need not be."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.asked: list[Asked] = []
        self.losses: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.excused: set[str] = set()  # no other engine was there, or their own failure named them

    async def run(self, changes: list[Change]) -> None:
        for name, number, detail in changes:
            self.fleet.clock.advance(0.01 * detail)
            kept = {id(one): one.reader.ids() for one in self.asked if one.ended}
            await getattr(self, "_" + name.replace(" ", "_"))(number, detail)
            self._check(kept)

    def _check(self, kept: dict[int, list[int]]) -> None:
        fleet = self.fleet
        live = [one for one in self.asked if not one.ended]
        assert fleet.routed.num_live == fleet.inflight.own == len(live)
        assert all(fleet.where(one) is not None for one in live), "what has not ended is in an engine"
        for one in self.asked:
            one.check_part()
            if id(one) in kept:
                assert one.reader.ids() == kept[id(one)], "nothing comes behind an end"

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
        self.fleet.routed.look()

    async def _die(self, number: int, detail: int) -> None:
        if not self.fleet.models[number].dead:
            self._lose(number, lambda: self.fleet.die(number))

    async def _unseen_death(self, number: int, detail: int) -> None:
        """It is gone, and requests are sent to it before anybody notices."""
        model = self.fleet.models[number]
        if not model.dead:
            model.dead, model.samples = True, {}
            await self._submit(number, detail)
            model.dead = False
            self._lose(number, lambda: self.fleet.die(number))

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
            self.fleet.freeze(number)
            here = {id(one) for one in self._in(number)}
            self.fleet.models[number].step()
            self.fleet.routed.look()
            for one in self.asked:
                if id(one) in here and self.fleet.where(one) != number:
                    self.losses[one.request.request_id] = self.losses.get(one.request.request_id, 0) + 1

    async def _thaw(self, number: int, detail: int) -> None:
        if self.fleet.models[number].frozen and not self.fleet.models[number].dead:
            self.fleet.thaw(number)

    async def _drain(self, number: int, detail: int) -> None:
        if not self.fleet.models[number].dead and not self.fleet.models[number].frozen:
            self.fleet.stand(number, EngineState.DRAINING)

    async def _undrain(self, number: int, detail: int) -> None:
        if not self.fleet.models[number].dead and not self.fleet.models[number].frozen:
            self.fleet.stand(number, EngineState.READY)

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
        dispatcher = self.fleet.routed._dispatcher
        assert dispatcher is not None
        return dispatcher._placer._candidates(self.fleet.clock.now(), but)

    def _in(self, number: int) -> list[Asked]:
        return [one for one in self.asked if not one.ended and self.fleet.where(one) == number]

    def _lose(self, number: int, lose: Callable[[], None], suspects: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        fleet = self.fleet
        fleet.routed.look()
        here = self._in(number)
        wire = {one.live.wire_id: one for one in here}
        others = self._candidates(number)
        shelter = [slot for slot in fleet.routed._slots if slot.number != number and slot.there]
        drained = fleet.routed._slots[number].draining and not suspects
        lose()
        for wire_id, one in wire.items():
            name = one.request.request_id
            named = not suspects or wire_id in suspects
            alone = suspects == {wire_id}
            spent = not drained and self.losses.get(name, 0) >= (1 if named else 3)
            nowhere = not (others or (shelter and one.live.begun))
            if alone or spent or nowhere:
                homeless = EngineDeadError if one.live.begun else EngineUnavailableError
                expected = EngineLostError if alone or spent else homeless
                assert [type(error) for error in one.reader.errors] == [expected]
            else:
                assert not one.ended and fleet.where(one) != number, "it goes on"
            self.losses[name] = self.losses.get(name, 0) + (not drained)

    # --- the end ------------------------------------------------------------------------------------------------
    async def end(self) -> None:
        for number, model in enumerate(self.fleet.models):
            if model.frozen and not model.dead:
                self.fleet.thaw(number)
        self.fleet.finish()
        for one in self.asked:
            self._check_end(one)

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


@given(changes)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_nothing_is_lost_and_nothing_comes_twice(changes: list[Change]) -> None:
    async def work(fleet: Fleet) -> None:
        for number in fleet.engines:
            fleet.promise(number, cost_s=(0.001, 1e-6, 1e-6, 0.0), free_seats=64, free_blocks=64)
        story = Story(fleet)
        await story.run(changes)
        await story.end()

    asyncio.run(with_fleet(work, ENGINES, "pace"))
