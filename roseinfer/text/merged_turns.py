"""Merged messages, for chat templates that allow only one system message and require alternating turns."""

from collections.abc import Sequence
from typing import Any

_MERGED_ROLES = ("system", "user")


def merged_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages with consecutive user messages merged; None if that changes nothing.

    A system message directly after the first one is merged into it; later ones become part of the user's turn. Contents
    are texts.
    """
    merged: list[dict[str, Any]] = []
    for message in messages:
        previous = merged[-1] if merged else None
        role = message["role"]
        if role == "system" and previous is not None and previous["role"] != "system":
            role = "user"
        if previous is not None and previous["role"] == role and role in _MERGED_ROLES:
            texts = [one.get("content") for one in (previous, message)]
            merged[-1] = {**previous, "content": "\n\n".join(text for text in texts if text)}
        else:
            merged.append({**message, "role": role})
    return merged if merged != list(messages) else None
