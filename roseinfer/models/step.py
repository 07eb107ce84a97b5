"""Context of one step, for the layers of a model."""

from typing import NamedTuple

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch


class StepContext(NamedTuple):
    """Context of one forward pass, which reaches every layer: the step's tokens, and attention over them."""

    batch: ForwardBatch
    attention: AttentionBackend
