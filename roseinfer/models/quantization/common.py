"""Fields that several methods of quantisation share."""

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.fields import ConfigFields
from roseinfer.quant.ignored import check_ignored

# Origin of the checkpoint; it does not change the tensors.
HARMLESS = frozenset(
    "quant_method quantization_status global_compression_ratio version producer provider dequantize".split()  # noqa: SIM905
)


def ignored(fields: ConfigFields, key: str) -> tuple[str, ...]:
    """Return the names of layers that are not quantised. Raise `UnsupportedModelError` for an invalid expression."""
    names = fields.names(key)
    for name in names:
        check_pattern(fields, key, name)
    return names


def check_pattern(fields: ConfigFields, key: str, entry: str) -> None:
    """Raise `UnsupportedModelError` if an entry of the field is an invalid regular expression."""
    try:
        check_ignored(entry)
    except ValueError as error:
        fields.refuse(key, entry, str(error))


def needed_object(fields: ConfigFields, key: str, hint: str = "") -> ConfigFields:
    """Return an inner object. Raise `UnsupportedModelError` if it is absent or empty."""
    found = fields.inner(key)
    if found is None:
        raise UnsupportedModelError(f"{fields.where}: {key} is missing{hint}")
    return found
