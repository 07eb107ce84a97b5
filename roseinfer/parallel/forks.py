"""Objects that a forked process must not destroy: their destructors wait for threads that a fork does not have."""

import ctypes
import os
import weakref

_kept: "weakref.WeakSet[object]" = weakref.WeakSet()


def keep_in_forks(thing: object) -> None:
    """Never destroy `thing` in forks of this process."""
    _kept.add(thing)


def _keep() -> None:
    for thing in _kept:
        # A reference in Python does not suffice: the interpreter drops all of them at exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)
