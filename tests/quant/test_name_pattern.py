"""Regular expressions of configs: those that checkpoints have match as Python's do, and none takes long."""

import re

import pytest

from roseinfer.quant.name_pattern import NamePattern

NAMES = [
    "lm_head",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.12.self_attn.q_proj",
    "model.layers.2.block_sparse_moe.gate",
    "visual.blocks.3.attn.qkv",
    "model.visual.merger",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab",
    "",
]


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head",
        "visual.*",
        ".*mlp.gate$",
        r"model\.layers\.(1|2)\..*",
        r".*layers\.[01]\..*_proj$",
        r"^model\.layers\.\d+\.(?:mlp|self_attn)\.(q|gate)_proj$",
        r"model.layers.1[0-9]?\.",
        r".*\.(self_attn|mlp\.gate)(_proj)?",
        ".*visual.*|.*lm_head",
        "[^m].*",
        r"\w+\.\w+?[-\w]*\.",
        "",
        "^$",
    ],
)
def test_matches_as_python_does(pattern: str) -> None:
    found = NamePattern(pattern)
    assert [found.matches(name) for name in NAMES] == [bool(re.match(pattern, name)) for name in NAMES]


@pytest.mark.parametrize(
    "pattern", [".*" * 300 + "x", "(a|a)" * 150 + "x", "((a|a)(a|a))?" * 60 + "x", "a?" * 300 + "x"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    """Those with which `re` would try all ways to divide the name."""
    assert not NamePattern(pattern).matches("a" * 60)


NOT_SIMPLE = r"(a+)+$ (a|b)* a{2} (?!x).* (?P<n>a) (a)\1 \bmlp ( ) a) [ [z-a] * a** a*+".split()  # noqa: SIM905


@pytest.mark.parametrize("pattern", [*NOT_SIMPLE, "\\", "(" * 500 + ")" * 500, "a" * 1001])
def test_what_is_not_simple_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"no simple|more than"):
        NamePattern(pattern)
