"""Arguments of earlier tool calls, in the form of chat templates."""

from typing import Any

import orjson


def plain_arguments(given: Any) -> Any:
    """Return the arguments of a call as an object: templates write it as JSON, and would quote a text twice.

    Models sometimes write other arguments, which are returned unchanged.
    """
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    try:
        decoded = orjson.loads(given)
    except ValueError:
        return given
    return decoded if isinstance(decoded, dict) else given
