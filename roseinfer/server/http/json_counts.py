"""Limits on the JSON in a body, checked before it is parsed: parsing and validation stop the event loop meanwhile."""

from roseinfer.server.http.errors import ApiError, too_many_values
from roseinfer.server.http.limits import Limits


def check_counts(data: bytes, limits: Limits) -> None:
    """Raise `ApiError` 413 for too many objects, lists, strings or values.

    Bytes are counted first, which takes a millisecond for 1 MiB: there are never fewer than what they stand for. Only
    if they are too many, what is in strings is left out.
    """
    # Each takes two bytes at least.
    if len(data) <= 2 * min(limits.max_json_objects, limits.max_json_lists, limits.max_json_strings):
        return
    if _too_many(data, data.count(b'"') // 2, limits) is None:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    strings = plain.count(b'"') // 2
    if strings <= limits.max_json_strings:  # else there would be too many pieces
        plain = b"".join(plain.split(b'"')[::2])
    refusal = _too_many(plain, strings, limits)
    if refusal is not None:
        raise refusal


def _too_many(data: bytes, strings: int, limits: Limits) -> ApiError | None:
    """Return the error if there is too much of anything. `data`: JSON; only marks outside strings should count."""
    if strings > limits.max_json_strings:
        return too_many_values(limits.max_json_strings, "strings and names of fields")
    if data.count(b"{") > limits.max_json_objects:
        return too_many_values(limits.max_json_objects, "objects")
    if data.count(b"[") > limits.max_json_lists:
        return too_many_values(limits.max_json_lists, "lists")
    if data.count(b",") > limits.max_json_values:
        return too_many_values(limits.max_json_values, "values")
    return None
