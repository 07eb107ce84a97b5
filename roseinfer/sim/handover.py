"""An experiment: prefill and decode apart. Engines have roles, and requests move between them after their first token.

A request begins on an engine that prefills (or does both, and then stays). With its first token it is handed over: its
K/V takes `move_s` a token to an engine that decodes, where it goes on as if it had been preempted and found all of it
in the prefix cache. What it holds at the first engine is free at once. It is turned away when it arrives if no engine
has room for its pace, or later by the engine that fills, for its first token.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from roseinfer.core.outputs import FinishReason, RequestOutput
from roseinfer.core.request import sequence_id
from roseinfer.core.slo import Cause, Rejection, Slo
from roseinfer.engine.messages import Add
from roseinfer.router.base import Ask, Placement
from roseinfer.sim.engine import SimulatedEngine
from roseinfer.sim.fleet import Call, Fleet, Slot
from roseinfer.sim.fleet_plan import BOTH, DECODE, PREFILL
from roseinfer.sim.machine import TOKEN
from roseinfer.sim.workload import Arrival


class RoledFleet(Fleet):
    """`plan.roles` are given. Prompts that are alike share blocks only on machines with a prefix cache."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._salted = not self._machine.prefix_caching
        self._machine = replace(self._machine, prefix_caching=True)
        roles = self.plan.roles
        self._decoding = {number for number, role in enumerate(roles) if role == DECODE}
        self._filling = {number for number, role in enumerate(roles) if role == PREFILL}

    def _keys(self, arrival: Arrival) -> list[bytes]:
        """None, where each request's blocks are its own."""
        return [] if self._salted else super()._keys(arrival)

    def _excluded(self, call: Call) -> Collection[int]:
        return self._filling if call.life.token_s else self._decoding

    def ask(self, call: Call) -> Ask:
        ask = super().ask(call)
        if not call.life.token_s and BOTH not in self.plan.roles:
            return ask._replace(tpot_s=inf)
        return ask

    def _place(self, call: Call) -> None:
        """One for whose pace no engine has room is turned away at once: behind its first token it cannot be."""
        if call.life.token_s or self._has_room(super().ask(call)):
            super()._place(call)
            return
        call.life.reason = FinishReason.REJECTED
        call.life.rejection = Rejection("tpot", 0.0, Cause.PACE)

    def _has_room(self, ask: Ask) -> bool:
        if not ask.promised:
            return True
        others = (number for number in range(self.plan.most) if number not in self._filling)
        return any(self.placer.outlook(number, ask, self.now_s).utilisation <= 1.0 for number in others)

    def _add_of(self, call: Call) -> Add:
        """An engine that only prefills is not told of objectives that it cannot break."""
        add = super()._add_of(call)
        meta = add.meta
        if self._salted:
            meta = replace(meta, cache_salt=str(call.number))
        if call.engine in self._filling and meta.slo is not None:
            meta = replace(meta, slo=Slo(ttft_s=meta.slo.ttft_s, class_name=meta.slo.class_name))
        add.meta = meta
        return add

    def _note(self, slot: Slot, output: RequestOutput) -> None:
        call = self.calls.get(output.request_id.rpartition(":")[0])
        super()._note(slot, output)
        if output.started is not None and slot.number in self._filling and call is not None and call.name in self.calls:
            self._hand_over(slot, call)

    def _hand_over(self, slot: Slot, call: Call) -> None:
        assert slot.engine is not None
        slot.engine.core.abort([sequence_id(call.name, 0)])
        self._forget(call)
        placement = self.placer.place(self.ask(call), self.now_s, self._excluded(call))
        assert placement is not None, "engines with roles do not go away"
        self.record.moved.append(call.number)
        tokens = len(call.arrival.prompt_ids)
        self.moving += 1
        self.at(self.now_s + tokens * self.plan.move_s, partial(self._take_over, call, placement))

    def _take_over(self, call: Call, placement: Placement) -> None:
        engine = self.slots[placement.engine].engine
        assert engine is not None
        self.moving -= 1
        self._send(call, placement)
        load(engine, self._add_of(call))


def load(engine: SimulatedEngine, add: Add) -> None:
    """Put the K/V of a request that has begun elsewhere into the engine's prefix cache, if there is room for it."""
    kv = engine.core.scheduler.kv
    tokens = [*add.prompt_ids, TOKEN]
    name = f"moved {add.request_id}"
    kv.open(name, add.meta.cache_salt)
    if kv.grow(name, len(tokens)) is not None:
        kv.register(name, tokens, len(tokens), len(tokens))
    kv.close(name)
