"""Triton's interpreter with the numpy at hand."""

import pytest

from roseinfer.kernels.triton_support import HAS_TRITON


def allow_loaded_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loop run up to a number that the kernel has loaded.

    The interpreter of Triton 3.6 keeps such a number in an array of one element, which numpy 2.4 no longer takes for
    an integer.
    """
    if not HAS_TRITON:
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
