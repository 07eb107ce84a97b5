"""Reader of models for several kinds of input, whose text model has a config within theirs; without torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roseinfer.models.decoder_config import read_dtype
from roseinfer.models.families.family import ReadConfig
from roseinfer.models.fields import ConfigFields
from roseinfer.models.harmless import HARMLESS, HARMLESS_PREFIXES
from roseinfer.models.spec import ModelSpec


def read_text_config(
    fields: ConfigFields,
    architecture: str,
    *,
    readers: Mapping[str, ReadConfig],
    default: str,
    **options: Any,
) -> ModelSpec:
    """Return the spec of the model that `text_config` describes, whose `model_type` (by default `default`) is one of
    `readers`. `options` replace values of the spec. The caller reads the fields outside.
    """
    inner = fields.inner("text_config")
    if inner is None:
        fields.refuse("text_config", fields.get("text_config"), "the text model's fields are needed")
    kind = inner.get("model_type", default)
    if not isinstance(kind, str) or kind not in readers:
        inner.refuse("model_type", kind, f"known: {', '.join(readers)}")
    spec = readers[kind](inner, architecture)
    if inner.get("dtype") is None and inner.get("torch_dtype") is None:
        spec = replace(spec, dtype=read_dtype(fields))
    inner.refuse_unread(HARMLESS, HARMLESS_PREFIXES)
    return replace(spec, **options)
