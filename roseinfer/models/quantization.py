"""Reader of a checkpoint's quantisation from config.json or modelopt's own file; without torch.

Supported is FP8 (e4m3) with a scale for each matrix, output channel or block of 128 x 128, and MXFP4 for experts. All
else is refused by name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.json_file import read_object
from roseinfer.models.fields import ConfigFields
from roseinfer.quant.fp8_scheme import Fp8Scheme, check_ignored
from roseinfer.quant.mxfp4_scheme import Mxfp4Scheme
from roseinfer.quant.scheme import QuantScheme

MODELOPT_FILE = "hf_quant_config.json"
_KEY = "quantization_config"
_BLOCK = [128, 128]

Layout = Literal["block", "channel", "tensor"]

# Origin of the checkpoint; it does not change the tensors.
_HARMLESS = frozenset(
    "quant_method quantization_status global_compression_ratio version producer provider dequantize".split()  # noqa: SIM905
)
_HARMLESS_OF_ARGS = frozenset("observer observer_kwargs scale_dtype zp_dtype".split())  # noqa: SIM905
# `quant_algo` covers these.
_HARMLESS_OF_MODELOPT = _HARMLESS | {"config_groups"}
_ALGORITHMS: dict[str, Layout] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}


def read_quantization(config: ConfigFields, folder: Path) -> QuantScheme | None:
    """Return how the checkpoint in `folder` is quantised; None if its weights are floats. `config`: its config.json.

    Raise `UnsupportedModelError` naming the field that is not supported.
    """
    fields = config.inner(_KEY)
    if fields is None:
        path = folder / MODELOPT_FILE
        return _modelopt(ConfigFields(read_object(path), str(path))) if path.is_file() else None
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        fields.refuse("quant_method", method, f"known: {', '.join(_READERS)}")
    return _READERS[method](fields)


def _fp8(fields: ConfigFields) -> Fp8Scheme:
    """Read Qwen's and DeepSeek's block scales, or AutoFP8's scalars."""
    fields.only("fmt", "e4m3")
    fields.only("activation_scheme", "dynamic", "static")
    fields.only("scale_fmt", "float", hint="scales are any float32 numbers here")
    fields.only("kv_cache_scheme", "static")
    block = fields.get("weight_block_size")
    if block not in (None, _BLOCK):
        fields.refuse("weight_block_size", block, "blocks are 128 x 128 here")
    ignored = _ignored(fields, "modules_to_not_convert") + _ignored(fields, "ignored_layers")
    fields.refuse_unread(_HARMLESS)
    return Fp8Scheme("tensor" if block is None else "block", ignored)


def _compressed_tensors(fields: ConfigFields) -> Fp8Scheme:
    fields.only("format", "float-quantized")
    groups = fields.inner("config_groups")
    if groups is None:
        raise UnsupportedModelError(f"{fields.where}: config_groups is missing")
    layouts = {_group(group) for group in map(groups.inner, groups) if group is not None}
    if len(layouts) != 1:
        fields.refuse("config_groups", sorted(layouts), "the weights of all groups must share scales alike")
    _check_kv_cache(fields)
    ignored = _ignored(fields, "ignore")
    fields.refuse_unread(_HARMLESS)
    return Fp8Scheme(layouts.pop(), ignored)


def _group(group: ConfigFields) -> Layout:
    """Return the layout of a group's scales. The tensors show which layers the group targets."""
    group.names("targets")
    group.only("format", "float-quantized")
    weights = group.inner("weights")
    if weights is None:
        raise UnsupportedModelError(f"{group.where}: weights is missing (only weights are quantised)")
    layout = _weights(weights)
    activations = group.inner("input_activations")
    if activations is not None:  # not used: activations are scaled dynamically, by row or in groups of 128
        _check_args(activations)
        activations.only("dynamic", True, False)
        activations.only("strategy", "token", "tensor", "group")
        activations.only("group_size", 128)
        activations.refuse_unread(_HARMLESS_OF_ARGS)
    group.refuse_unread()
    return layout


def _weights(args: ConfigFields) -> Layout:
    _check_args(args)
    args.only("dynamic", False)
    layouts: dict[str, Layout] = {"channel": "channel", "tensor": "tensor", "block": "block"}
    strategy = args.get("strategy")
    if not isinstance(strategy, str) or strategy not in layouts:
        args.refuse("strategy", strategy, f"known: {', '.join(layouts)}")
    structure = args.get("block_structure")
    if strategy == "block" and structure not in (_BLOCK, "128x128"):
        args.refuse("block_structure", structure, "blocks are 128 x 128 here")
    args.refuse_unread(_HARMLESS_OF_ARGS)
    return layouts[strategy]


def _check_args(args: ConfigFields) -> None:
    for key, wanted in (("num_bits", 8), ("type", "float")):
        if args.get(key) != wanted:
            args.refuse(key, args.get(key), f"it is {wanted} here")
    args.only("symmetric", True)


def _modelopt(fields: ConfigFields) -> Fp8Scheme:
    """Read either form: all fields in one object, or within `quantization`."""
    quantization = fields.inner("quantization")
    if quantization is not None:
        fields.only("kv_cache_quant_algo", "FP8")
        fields.refuse_unread(_HARMLESS)
    fields = quantization or fields
    algorithm = fields.get("quant_algo")
    layout = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if layout is None:
        fields.refuse("quant_algo", algorithm, f"known: {', '.join(_ALGORITHMS)}")
    fields.only("kv_cache_quant_algo", "FP8")
    _check_kv_cache(fields)
    ignored = _ignored(fields, "exclude_modules") + _ignored(fields, "ignore")
    fields.refuse_unread(_HARMLESS_OF_MODELOPT)
    return Fp8Scheme(layout, ignored)


def _mxfp4(fields: ConfigFields) -> Mxfp4Scheme:
    ignored = _ignored(fields, "modules_to_not_convert")
    fields.refuse_unread(_HARMLESS)
    return Mxfp4Scheme(ignored)


_READERS: dict[str, Callable[[ConfigFields], QuantScheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def _check_kv_cache(fields: ConfigFields) -> None:
    """Check the description of the KV cache's scales, which are then looked up among the tensors."""
    scheme = fields.inner("kv_cache_scheme")
    if scheme is None:
        return
    _check_args(scheme)
    scheme.only("dynamic", False)
    scheme.only("strategy", "tensor", "attn_head")
    scheme.refuse_unread(_HARMLESS_OF_ARGS)


def _ignored(fields: ConfigFields, key: str) -> tuple[str, ...]:
    names = fields.names(key)
    for name in names:
        try:
            check_ignored(name)
        except ValueError as error:
            fields.refuse(key, name, str(error))
    return names
