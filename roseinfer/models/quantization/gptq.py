"""Reader of GPTQ's config, from config.json or the file of AutoGPTQ and GPTQModel."""

from typing import Any

from roseinfer.core.json_file import shortened
from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import check_pattern, ignored
from roseinfer.models.quantization.int4 import CODE_BITS, HARMLESS_RECIPE, check_bits, group_size
from roseinfer.quant.ignored import REGEX_PREFIX
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme

_V2 = "gptq_v2"
_HARMLESS = HARMLESS_RECIPE | {"backend"}
# Beginnings of a rule: its layers are not quantised, or otherwise than the rest. Without any, the second is meant.
_SKIP, _CHANGE = "-:", "+:"
_HARMLESS_OF_RULES = frozenset({"desc_act", "static_groups", "mse"})

Exceptions = tuple[tuple[str, Int4Groups], ...]


def read_gptq(fields: ConfigFields) -> Int4Scheme:
    fields.only("quant_method", "gptq")
    for key in ("checkpoint_format", "format"):
        fields.only(key, "gptq", _V2, hint=f"known: gptq, {_V2}")
    fields.only("is_marlin_format", False)
    fields.only("pack_dtype", "int32", "torch.int32")
    groups = _groups(fields)
    exceptions, skipped = _dynamic(fields, groups)
    names = skipped + ignored(fields, "modules_to_not_convert")
    layout = fields.get("checkpoint_format") or fields.get("format")
    fields.refuse_unread(_HARMLESS)
    return Int4Scheme("gptq_v2" if layout == _V2 else "gptq", groups, exceptions, names)


def _groups(fields: ConfigFields) -> Int4Groups:
    check_bits(fields)
    return Int4Groups(group_size(fields), fields.flag("sym", default=True))


def _dynamic(fields: ConfigFields, groups: Int4Groups) -> tuple[Exceptions, tuple[str, ...]]:
    """Return the groups of layers that differ from the rest, and entries for layers that are not quantised."""
    rules = fields.get("dynamic") or {}
    if not isinstance(rules, dict):
        fields.refuse("dynamic", rules, "an object is needed")
    exceptions, skipped = [], []
    for rule, changes in rules.items():
        pattern = rule.removeprefix(_SKIP).removeprefix(_CHANGE)
        check_pattern(fields, "dynamic", f"{REGEX_PREFIX}{pattern}")
        if rule.startswith(_SKIP):
            skipped.append(f"{REGEX_PREFIX}{pattern}")
        else:
            exceptions.append((pattern, _changed(fields, rule, changes, groups)))
    return tuple(exceptions), tuple(skipped)


def _changed(fields: ConfigFields, rule: str, changes: Any, groups: Int4Groups) -> Int4Groups:
    if not isinstance(changes, dict):
        fields.refuse("dynamic", {rule: changes}, "an object is needed for each rule")
    inner = ConfigFields(changes, f"{fields.where} dynamic {shortened(rule)}")
    inner.assume(bits=CODE_BITS, group_size=groups.size or -1, sym=groups.symmetric)
    found = _groups(inner)
    inner.refuse_unread(_HARMLESS_OF_RULES)
    return found
