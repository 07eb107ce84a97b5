"""Reader of llm-compressor's FP8 (float-quantized), integers of four bits (pack-quantized) and NVFP4
(nvfp4-pack-quantized).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import HARMLESS, ignored, needed_object
from roseinfer.models.quantization.fp8 import BLOCK
from roseinfer.models.quantization.int4 import CODE_BITS, group_size
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from roseinfer.quant.nvfp4_scheme import GROUP_COLUMNS, Nvfp4Scheme
from roseinfer.quant.scheme import QuantScheme

_FLOATS: Final = "float-quantized"
_PACKED: Final = "pack-quantized"
_NVFP4: Final = "nvfp4-pack-quantized"
_HARMLESS_OF_ARGS = frozenset("observer observer_kwargs scale_dtype zp_dtype".split())  # noqa: SIM905
# Orders of columns while weights were rounded. The tensors of a layer show if columns are still in that order.
_ORDERS = ("group", "weight", "static", "dynamic", True, False)
_STRATEGIES = ("group", "channel")

Layout = Literal["block", "channel", "tensor"]


def read_compressed_tensors(fields: ConfigFields) -> QuantScheme:
    fields.only("format", *_GROUP_READERS)
    read_group = _GROUP_READERS[fields.get("format") or _FLOATS]
    groups = needed_object(fields, "config_groups")
    found = {read_group(group) for group in map(groups.inner, groups) if group is not None}
    if len(found) != 1:
        fields.refuse("config_groups", sorted(map(str, found)), "the weights of all groups must share scales alike")
    check_kv_cache(fields)
    names = ignored(fields, "ignore")
    fields.refuse_unread(HARMLESS)
    return replace(found.pop(), ignored=names)


def _fp8_group(group: ConfigFields) -> Fp8Scheme:
    """Read a group. The tensors show which layers it targets."""
    layout = _fp8_weights(_weights_of(group, _FLOATS))
    activations = group.inner("input_activations")
    if activations is not None:  # not used: activations are scaled dynamically, by row or in groups of 128
        _check_args(activations, num_bits=8, type="float")
        activations.only("symmetric", True)
        activations.only("dynamic", True, False)
        activations.only("strategy", "token", "tensor", "group")
        activations.only("group_size", 128)
        activations.refuse_unread(_HARMLESS_OF_ARGS)
    group.refuse_unread()
    return Fp8Scheme(layout)


def _fp8_weights(args: ConfigFields) -> Layout:
    _check_args(args, num_bits=8, type="float")
    args.only("symmetric", True)
    args.only("dynamic", False)
    layouts: dict[str, Layout] = {"channel": "channel", "tensor": "tensor", "block": "block"}
    strategy = args.get("strategy")
    if not isinstance(strategy, str) or strategy not in layouts:
        args.refuse("strategy", strategy, f"known: {', '.join(layouts)}")
    structure = args.get("block_structure")
    if strategy == "block" and structure not in (BLOCK, "128x128"):
        args.refuse("block_structure", structure, "blocks are 128 x 128 here")
    args.refuse_unread(_HARMLESS_OF_ARGS)
    return layouts[strategy]


def _int4_group(group: ConfigFields) -> Int4Scheme:
    args = _weights_of(group, _PACKED)
    activations = group.get("input_activations")
    if activations is not None:
        group.refuse("input_activations", activations, "activations are not rounded with weights in four bits")
    group.refuse_unread()
    _check_args(args, num_bits=CODE_BITS, type="int")
    args.only("dynamic", False)
    args.only("actorder", *_ORDERS)
    strategy = args.get("strategy")
    if strategy not in _STRATEGIES:
        args.refuse("strategy", strategy, f"known: {', '.join(_STRATEGIES)}")
    if strategy == "channel":
        args.only("group_size", -1)
    size = group_size(args) if strategy == "group" else None
    found = Int4Groups(size, args.flag("symmetric", default=True))
    args.refuse_unread(_HARMLESS_OF_ARGS)
    return Int4Scheme(_PACKED, found)


def _nvfp4_group(group: ConfigFields) -> Nvfp4Scheme:
    args = _weights_of(group, _NVFP4)
    activations = group.inner("input_activations")
    group.refuse_unread()
    _nvfp4_args(args, dynamic=(False,))
    if activations is not None:  # not used: activations stay in 16 bits
        _nvfp4_args(activations, dynamic=(True, False, "local"))
    return Nvfp4Scheme("compressed-tensors")


def _nvfp4_args(args: ConfigFields, dynamic: tuple[bool | str, ...]) -> None:
    _check_args(args, num_bits=CODE_BITS, type="float", strategy="tensor_group", group_size=GROUP_COLUMNS)
    args.only("symmetric", True)
    args.only("dynamic", *dynamic)
    args.refuse_unread(_HARMLESS_OF_ARGS)


def _weights_of(group: ConfigFields, form: str) -> ConfigFields:
    group.names("targets")
    group.only("format", form)
    return needed_object(group, "weights", " (only weights are quantised)")


def _check_args(args: ConfigFields, **wanted: int | str) -> None:
    for key, value in wanted.items():
        if args.get(key) != value:
            args.refuse(key, args.get(key), f"it is {value} here")


_GROUP_READERS: dict[str, Callable[[ConfigFields], Fp8Scheme | Int4Scheme | Nvfp4Scheme]] = {
    _FLOATS: _fp8_group,
    _PACKED: _int4_group,
    _NVFP4: _nvfp4_group,
}


def check_kv_cache(fields: ConfigFields) -> None:
    """Check the description of the KV cache's scales, which are then looked up among the tensors."""
    scheme = fields.inner("kv_cache_scheme")
    if scheme is None:
        return
    _check_args(scheme, num_bits=8, type="float")
    scheme.only("symmetric", True)
    scheme.only("dynamic", False)
    scheme.only("strategy", "tensor", "attn_head")
    scheme.refuse_unread(_HARMLESS_OF_ARGS)
