"""Promises for tests that do not mind what they say."""

from roseinfer.core.promise import DUE_S, Promise
from roseinfer.core.step_cost import StepCost


def whole(k: int) -> Promise:
    """All of it says `k`: a row of two writes would not."""
    fields = {name: k for name, kind in Promise.__annotations__.items() if kind is int}
    fields |= {name: float(k) for name, kind in Promise.__annotations__.items() if kind is float}
    return Promise(**fields, cost=StepCost(*[float(k)] * 5), waiting_tokens=(k,) * len(DUE_S), draining=k % 2 == 1)
