"""Adjustments of Triton's interpreter: to the installed numpy, to a GPU's rounding, and for speed."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roseinfer.kernels.common.triton_support import HAS_TRITON


def clamp_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tl.clamp` give a bound for a NaN unless it is told to propagate it, as a GPU does."""
    if not HAS_TRITON:
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    none = interpreter._ir.PROPAGATE_NAN.NONE

    def clamp(arg: Any, low: Any, high: Any, propagate: Any) -> Any:
        within = np.clip if propagate != none else lambda x, low, high: np.fmin(np.fmax(x, low), high)
        return builder.ternary_op(arg, low, high, within)

    monkeypatch.setattr(builder, "create_clampf", clamp, raising=False)


@cache
def hurry() -> None:
    """Make kernels run in a fifth of the time in this process, with the same results.

    Not with a GPU: there kernels are compiled, by the same functions of Triton.
    """
    if not HAS_TRITON or torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    # The check for overflows takes ten operations for one, and its result is not used without `debug`.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    _remember_shapes()
    _compare_numbers()
    _pair_equal_types()
    _combine_halves()
    _patch_for_good()


@cache
def round_codes() -> None:
    """Make casts to float8e4nv in this process round as a GPU and torch do.

    The interpreter of Triton 3.6 drops the carry of a mantissa that is rounded up to the next power of two, which
    halves the number, and rounds ties up.
    """
    if not HAS_TRITON:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_exactly(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv or source not in (tl.float32, tl.float16):
            return convert(numbers, source, target, rounding)
        numbers = np.frombuffer(numbers.tobytes(), dtype=f"float{source.primitive_bitwidth}").reshape(numbers.shape)
        codes = torch.from_numpy(numbers.copy()).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).numpy()

    interpreter._convert_float = convert_exactly


def _patch_for_good() -> None:
    """Make the language that of the interpreter once, instead of at each launch and each call of a function.

    A loop may run up to a number that the kernel has loaded: the interpreter of Triton 3.6 keeps it in an array of one
    element, which numpy 2.4 no longer takes for an integer.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from tests.helpers import interpreted_arrays

    interpreter._patch_attr = _patch_member
    interpreter._patch_lang(SimpleNamespace(__globals__={"language": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: nothing
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    interpreted_arrays.install()


def _patch_member(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Call a function of the language with what makes tensors, and without its check that it gets that."""
    from triton.language.semantic import TritonSemantic

    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    scope.set_attr(owner, name, call)


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Look up one type, instead of filling a table of all types."""
    known: dict[str, Any] = {}

    def find_by_name(type: Any) -> Any:
        name = type.scalar.name
        if name not in known:
            known[name] = find(type)
        return known[name]

    return find_by_name


def _remember_shapes() -> None:
    """Cache shapes and their types, which every value would compute again."""
    import triton.language as tl

    make_tensor, make_type = tl.core.tensor.__init__, tl.core.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, type)
            shapes[shape] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if not all(size.__class__ is int for size in shape):  # a number of Triton's own, whose hash is shared
            make_type(self, element_ty, shape)
            return
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    tl.core.tensor.__init__, tl.core.block_type.__init__ = tensor, block_type


def _compare_numbers() -> None:
    """Compare shapes as lists, instead of making tuples of Triton's own, with types and names, for each comparison."""
    import triton.language as tl

    compare = tl.core.tuple.__eq__

    def equal(self: Any, other: Any) -> Any:
        values = getattr(other, "values", other)
        if values.__class__ is list and all(value.__class__ is int for value in values):
            return tl.constexpr(self.values == values)
        return compare(self, other)

    tl.core.tuple.__eq__ = equal


def _pair_equal_types() -> None:
    """Take two operands of one type and shape as they are, and remember numbers as constants of a block."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_type_checking_impl
    constants: dict[tuple[Any, ...], Any] = {}

    def pair(self: Any, lhs: Any, rhs: Any, *rules: bool) -> tuple[Any, Any]:
        if lhs.__class__ is not tl.core.tensor or lhs.dtype.__class__ is not tl.core.dtype:
            return check(self, lhs, rhs, *rules)
        # Shapes of one size are one object: see `_remember_shapes`. The fourth rule is that of divisions.
        if rhs.__class__ is tl.core.tensor and rhs.dtype is lhs.dtype and rhs.shape is lhs.shape and len(rules) < 4:
            return lhs, rhs
        if rhs.__class__ not in (int, float):
            return check(self, lhs, rhs, *rules)
        key = (repr(rhs), lhs.dtype.name, id(lhs.shape), *rules)
        if key not in constants:
            left, right = check(self, lhs, rhs, *rules)
            if left is not lhs:
                return left, right
            constants[key] = right
        return lhs, constants[key]

    TritonSemantic.binary_op_type_checking_impl = pair


def _combine_halves() -> None:
    """Reduce and scan by functions of our own many numbers at a time, as a tree, instead of number by number."""
    from triton.runtime import interpreter

    def combined(op: Any, kinds: list[Any], before: list[Any], after: list[Any]) -> list[Any]:
        operands = [
            op.to_tensor(part, kind) for parts in (before, after) for part, kind in zip(parts, kinds, strict=True)
        ]
        found = op.combine_fn.fn(*operands)
        found = found if isinstance(found, tuple) else (found,)
        return [op.to_tensor(each.handle.data, kind).handle.data for each, kind in zip(found, kinds, strict=True)]

    def reduce(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        if self.axis is None:
            return number_by_number(self, inputs)
        parts, kinds = [np.moveaxis(each.handle.data, self.axis, 0) for each in inputs], [each.dtype for each in inputs]
        while len(parts[0]) > 1:  # a power of two
            parts = combined(self, kinds, [part[::2] for part in parts], [part[1::2] for part in parts])
        parts = [np.moveaxis(part, 0, self.axis) if self.keep_dims else part[0] for part in parts]
        return [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]

    def scan(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        parts, kinds = [np.moveaxis(each.handle.data, self.axis, 0) for each in inputs], [each.dtype for each in inputs]
        distance = 1
        while distance < len(parts[0]):
            later = combined(self, kinds, [np.roll(part, distance, 0) for part in parts], parts)
            parts = [np.concatenate([old[:distance], new[distance:]]) for old, new in zip(parts, later, strict=True)]
            distance *= 2
        return [self.to_tensor(np.moveaxis(part, 0, self.axis), kind) for part, kind in zip(parts, kinds, strict=True)]

    number_by_number = interpreter.ReduceOps.generic_reduce
    interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = reduce, scan
