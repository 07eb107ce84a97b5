"""Operators, loads, stores and casts of Triton's interpreter as numpy's own, where numpy has the types.

Triton checks the types of both operands, makes blocks of one shape, and calls numpy, through some twenty functions for
one operator. These functions call numpy at once, which broadcasts by the same rules; all other cases stay Triton's.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Tensor = tl.core.tensor
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64")
FLOATS = ("fp16", "fp32", "fp64")
OFFSETS = ("int32", "int64")


class Shapes:
    """Shapes of blocks: one object for each, with its type for each type of elements."""

    def __init__(self) -> None:
        self._types: dict[tuple[str, int], tuple[Any, Any, Any]] = {}
        self._joined: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._sizes: dict[int, tuple[int, ...]] = {}

    def sizes(self, shape: Any) -> tuple[int, ...]:
        """Return a shape as numbers."""
        if id(shape) not in self._sizes:
            self._sizes[id(shape)] = tuple(size.value for size in shape)
        return self._sizes[id(shape)]

    def joined(self, left: Any, right: Any) -> tuple[int, ...]:
        """Return the shape of two blocks together. Raises ValueError if they do not fit."""
        key = id(left), id(right)
        if key not in self._joined:
            self._joined[key] = np.broadcast_shapes(self.sizes(left), self.sizes(right))
        return self._joined[key]

    def tensor(self, data: Any, element: Any, dtype: Any, sizes: tuple[int, ...]) -> Any:
        """Return numbers as a tensor. element: the type that the interpreter gives them."""
        made = object.__new__(Tensor)
        key = dtype.name, sizes
        if key not in self._types:
            pattern = Tensor(TensorHandle(data, element), tl.block_type(dtype, list(sizes)) if sizes else dtype)
            self._types[key] = pattern.type, pattern.numel, pattern.shape
        made.handle = handle = object.__new__(TensorHandle)
        handle.data, handle.dtype, handle.attr = data, element, {}
        made.dtype = dtype
        made.type, made.numel, made.shape = self._types[key]
        return made


shapes = Shapes()


def install() -> None:
    """Replace the operators of tensors, once Triton has made them those of the interpreter."""
    _take_tensors()
    _cast_at_once()
    numbers = (*INTEGERS, *FLOATS)
    for name, apply in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        _replace(f"__{name}__", _arithmetic(apply, numbers, pointers=name == "add"))
        _replace(f"__r{name}__", _arithmetic(lambda x, y, apply=apply: apply(y, x), numbers))
    _replace("__truediv__", _arithmetic(np.divide, ("fp32", "fp64")))
    _replace("__floordiv__", _arithmetic(_whole_quotient, ("int32", "int64")))
    _replace("__mod__", _arithmetic(np.fmod, ("int32", "int64")))
    for name, apply in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        _replace(f"__{name}__", _arithmetic(apply, ("int1", *INTEGERS)))
    comparisons = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for name, apply in (comparisons | {"eq": np.equal, "ne": np.not_equal}).items():
        _replace(f"__{name}__", _comparison(apply, numbers))
    _replace("__getitem__", _index)
    _broadcast_at_once()
    for language in (tl, tl.core):
        language.load = _load(language.load)
        language.store = _store(language.store)
        language.where = _where(language.where)
    tl.sum, tl.max = _reduction(tl.sum, np.add.reduce), _reduction(tl.max, np.fmax.reduce)


def _replace(name: str, make: Callable[[Any], Any]) -> None:
    setattr(Tensor, name, make(getattr(Tensor, name)))


def _arithmetic(apply: Callable[..., Any], kinds: tuple[str, ...], pointers: bool = False) -> Callable[[Any], Any]:
    """Return what makes an operator of Triton's. Its result has the type of both operands, or the wider integer's."""

    def make(slow: Any) -> Any:
        def operator(self: Any, other: Any) -> Any:
            if other.__class__ is tl.constexpr:
                other = other.value
            kind, own = self.dtype.name, self.handle
            if kind in kinds:
                if other.__class__ is Tensor:
                    if other.dtype.name == kind or (kind in OFFSETS and other.dtype.name in OFFSETS):
                        wider = other if kind == "int32" else self
                        data = apply(own.data, other.handle.data)
                        sizes = shapes.joined(self.shape, other.shape)
                        return shapes.tensor(data, wider.handle.dtype, wider.dtype, sizes)
                elif (other.__class__ is int and kind != "int1") or (other.__class__ is float and kind in FLOATS):
                    data = apply(own.data, own.data.dtype.type(other))
                    return shapes.tensor(data, own.dtype, self.dtype, shapes.sizes(self.shape))
            elif pointers and self.dtype.is_ptr():
                width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
                if other.__class__ is Tensor and other.dtype.name in OFFSETS:
                    data = own.data + other.handle.data.astype(np.uint64) * np.uint64(width)
                    return shapes.tensor(data, own.dtype, self.dtype, shapes.joined(self.shape, other.shape))
                if other.__class__ is int and other >= 0:
                    data = own.data + np.uint64(other * width)
                    return shapes.tensor(data, own.dtype, self.dtype, shapes.sizes(self.shape))
            return slow(self, other)

        return operator

    return make


def _comparison(apply: Callable[..., Any], kinds: tuple[str, ...]) -> Callable[[Any], Any]:
    def make(slow: Any) -> Any:
        def operator(self: Any, other: Any) -> Any:
            if other.__class__ is tl.constexpr:
                other = other.value
            kind = self.dtype.name
            if kind in kinds:
                if other.__class__ is Tensor:
                    if other.dtype.name == kind or (kind in OFFSETS and other.dtype.name in OFFSETS):
                        data = apply(self.handle.data, other.handle.data)
                        return shapes.tensor(data, tl.int1, tl.int1, shapes.joined(self.shape, other.shape))
                elif (other.__class__ is int and kind in ("int32", "int64", "fp32")) or (
                    other.__class__ is float and kind == "fp32"
                ):
                    data = apply(self.handle.data, other)
                    return shapes.tensor(data, tl.int1, tl.int1, shapes.sizes(self.shape))
            return slow(self, other)

        return operator

    return make


def _whole_quotient(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


def _index(slow: Any) -> Any:
    """Return indexing by `:` and None."""

    def index(self: Any, slices: Any) -> Any:
        if slices.__class__ is not tuple or not self.shape or any(part is not None and part != _ALL for part in slices):
            return slow(self, slices)
        data = self.handle.data[slices]
        return shapes.tensor(data, self.handle.dtype, self.dtype, data.shape)

    return index


_ALL = slice(None)


def _take_tensors() -> None:
    """Take tensors as they are where Triton makes tensors of numbers, and remember ranges."""
    slow, arange = TritonSemantic.to_tensor, TritonSemantic.arange
    ranges: dict[tuple[int, int], Any] = {}

    def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if value.__class__ is Tensor else slow(self, value, check_type)

    def remembered(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None:
            return arange(self, start, end, ret_ty=ret_ty)
        if (start, end) not in ranges:
            ranges[start, end] = arange(self, start, end)
        return ranges[start, end]

    TritonSemantic.to_tensor, TritonSemantic.arange = to_tensor, remembered


def _cast_at_once() -> None:
    slow = TritonSemantic.cast
    sources, targets = {"int1", *INTEGERS, *FLOATS}, {*INTEGERS, *FLOATS}

    def cast(self: Any, value: Any, type: Any, rounding: Any = None) -> Any:
        source, target = value.dtype.name, type.scalar.name
        if source == target:
            return value
        if rounding is not None or target not in targets:
            return slow(self, value, type, rounding)
        if source in sources:
            data = value.handle.data.astype(interpreter._get_np_dtype(type.scalar))
        elif source == "bf16" and target == "fp32":
            data = (value.handle.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return slow(self, value, type, rounding)
        return shapes.tensor(data, type.scalar, type.scalar, shapes.sizes(value.shape))

    TritonSemantic.cast = cast


def _broadcast_at_once() -> None:
    slow = TritonSemantic.broadcast_impl_value

    def widened(value: Any, sizes: tuple[int, ...]) -> Any:
        if shapes.sizes(value.shape) == sizes:
            return value
        return shapes.tensor(_spread(value.handle.data, sizes), value.handle.dtype, value.dtype, sizes)

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if left.__class__ is not Tensor or right.__class__ is not Tensor:
            return slow(self, left, right)
        if left.shape is right.shape:
            return left, right
        sizes = shapes.joined(left.shape, right.shape)
        return widened(left, sizes), widened(right, sizes)

    TritonSemantic.broadcast_impl_value = broadcast


def _load(slow: Any) -> Any:
    """Return `tl.load` of pointers."""

    def load(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any) -> Any:
        mask, other = _plain(mask), _plain(other)
        kind = _kind_at(pointer)
        if kind is not None and not rest and _is_mask(mask) and (other is None or other.__class__ in (int, float)):
            dtype = interpreter._get_np_dtype(kind)
            if not other or kind.name in INTEGERS or kind.name in FLOATS:
                data, where, sizes = _places(pointer, mask)
                found = interpreter._interpreter.load(data, where, _filled(data.shape, other or 0, dtype), dtype)
                return shapes.tensor(found, kind, kind, sizes)
        return slow(pointer, mask, other, *rest, **options)

    return load


def _store(slow: Any) -> Any:
    """Return `tl.store` to pointers."""

    def store(pointer: Any, value: Any, mask: Any = None, *rest: Any, **options: Any) -> Any:
        mask = _plain(mask)
        kind = _kind_at(pointer)
        if kind is not None and not rest and _is_mask(mask) and value.__class__ is Tensor and value.dtype == kind:
            data, where, _ = _places(pointer, mask)
            interpreter._interpreter.store(data, _spread(value.handle.data, data.shape), where)
            return None
        return slow(pointer, value, mask, *rest, **options)

    return store


def _where(slow: Any) -> Any:
    """Return `tl.where` between numbers of one type."""

    def where(condition: Any, x: Any, y: Any) -> Any:
        x, y = _plain(x), _plain(y)
        if x.__class__ is Tensor and condition.__class__ is Tensor and condition.dtype.name == "int1":
            kind = x.dtype.name
            of_floats = kind in FLOATS and y.__class__ in (int, float)
            if of_floats or (y.__class__ is Tensor and y.dtype.name == kind and kind in ("int1", *INTEGERS, *FLOATS)):
                other = x.handle.data.dtype.type(y) if of_floats else y.handle.data
                data = np.where(condition.handle.data, x.handle.data, other)
                alone = not (condition.shape or x.shape or (not of_floats and y.shape))
                return shapes.tensor(data, x.handle.dtype, x.dtype, () if alone else data.shape)
        return slow(condition, x, y)

    return where


def _reduction(slow: Any, reduce: Callable[..., Any]) -> Any:
    """Return `tl.sum` or `tl.max` along an axis, of numbers that it takes as they are."""

    def reduction(value: Any, axis: Any = None, *rest: Any, **options: Any) -> Any:
        axis = _plain(axis)
        simple = value.__class__ is Tensor and axis.__class__ is int and not rest and not options
        if simple and len(value.shape) > 1 and value.dtype.name in ("fp32", "fp64", "int32", "int64"):
            data = reduce(value.handle.data, axis=axis, dtype=value.handle.data.dtype)
            return shapes.tensor(data, value.handle.dtype, value.dtype, data.shape)
        return slow(value, axis, *rest, **options)

    return reduction


def _kind_at(pointer: Any) -> Any:
    """Return the type of the numbers at some pointers, or None where Triton converts them."""
    if pointer.__class__ is not Tensor or not pointer.dtype.is_ptr():
        return None
    kind = pointer.dtype.element_ty
    return None if kind.is_block() or kind.name == "int1" else kind


def _is_mask(value: Any) -> bool:
    return value is None or (value.__class__ is Tensor and value.dtype.name == "int1")


def _places(pointer: Any, mask: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """Return pointers and mask as arrays of one shape, and the shape of the block, which is empty for a number."""
    data = pointer.handle.data
    if mask is None:
        return data, _filled(data.shape, True, np.dtype(bool)), shapes.sizes(pointer.shape)
    sizes = shapes.joined(pointer.shape, mask.shape)
    return _spread(data, sizes), _spread(mask.handle.data, sizes), sizes


def _spread(array: Any, sizes: tuple[int, ...]) -> Any:
    """Return an array repeated to a shape; a single number as it is."""
    if array.shape == sizes or not sizes:
        return array
    repeated = np.empty(sizes, array.dtype)
    repeated[...] = array
    return repeated


@lru_cache(1024)
def _filled(sizes: tuple[int, ...], value: Any, dtype: Any) -> Any:
    return np.full(sizes, value, dtype)


def _plain(value: Any) -> Any:
    return value.value if value.__class__ is tl.constexpr else value
