"""Limits on the JSON in a body, checked before parsing, because parsing and validation block the event loop."""

from roseinfer.server.http.errors import ApiError, too_many_values
from roseinfer.server.http.limits import Limits


def check_counts(data: bytes, limits: Limits) -> None:
    """Raise `ApiError` 413 for too many objects, lists, strings or values.

    Delimiters are counted first, which takes a millisecond for 1 MiB; they are an upper bound. Only if they exceed a
    limit, those within strings are excluded.
    """
    # Each object, list or string takes at least two bytes.
    if len(data) <= 2 * min(limits.max_json_objects, limits.max_json_lists, limits.max_json_strings):
        return
    if _too_many(data, data.count(b'"') // 2, limits) is None:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes delimit strings
    strings = plain.count(b'"') // 2
    if strings <= limits.max_json_strings:  # otherwise splitting would make too many pieces
        plain = b"".join(plain.split(b'"')[::2])
    rejection = _too_many(plain, strings, limits)
    if rejection is not None:
        raise rejection


def _too_many(data: bytes, strings: int, limits: Limits) -> ApiError | None:
    """Return the error for the first exceeded limit. `data`: JSON, ideally without the contents of strings."""
    if strings > limits.max_json_strings:
        return too_many_values(limits.max_json_strings, "strings and names of fields")
    if data.count(b"{") > limits.max_json_objects:
        return too_many_values(limits.max_json_objects, "objects")
    if data.count(b"[") > limits.max_json_lists:
        return too_many_values(limits.max_json_lists, "lists")
    if data.count(b",") > limits.max_json_values:
        return too_many_values(limits.max_json_values, "values")
    return None
