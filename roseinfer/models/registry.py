"""Models by their specs."""

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.decoder import Decoder
from roseinfer.models.families import family_of, known_models_hint
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.base import Build


def build_model(spec: ModelSpec, build: Build) -> Decoder:
    """Return the model without weights; no memory is allocated for them yet.

    Raise `UnsupportedModelError` for an unknown architecture, `ConfigError` for a group that cannot share the model.
    """
    family = family_of(spec.architecture)
    if family is None:
        raise UnsupportedModelError(f"{spec.architecture} is not supported; {known_models_hint(spec.architecture)}")
    return Decoder(spec, build, family)
