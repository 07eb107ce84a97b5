"""Promises for tests that do not mind what they say."""

from roseinfer.core.promise import Promise
from roseinfer.core.step_cost import StepCost


def whole(k: int) -> Promise:
    """All of it says `k`: a row of two writes would not."""
    fields = {name: k for name, kind in Promise.__annotations__.items() if kind is int}
    fields |= {name: float(k) for name, kind in Promise.__annotations__.items() if kind is float}
    fields |= {name: (k,) * len(value) for name, value in Promise(0.0)._asdict().items() if type(value) is tuple}
    return Promise(**fields, cost=StepCost(*[float(k)] * 5), draining=k % 2 == 1)
