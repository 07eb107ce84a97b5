"""What a fork of a process must not end: what waits then for its threads, which a fork does not have."""

import ctypes
import os
import weakref

_kept: "weakref.WeakSet[object]" = weakref.WeakSet()


def keep_in_forks(thing: object) -> None:
    """A fork of this process that is made while `thing` is there never ends it."""
    _kept.add(thing)


def _keep() -> None:
    for thing in _kept:
        # No reference of Python's own would do: at its end the interpreter drops them all.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)
