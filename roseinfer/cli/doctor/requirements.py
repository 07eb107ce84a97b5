"""Requirements in roseinfer's own metadata, and whether they are installed."""

import re
import sys
from collections.abc import Iterable
from importlib import metadata

from roseinfer.cli.doctor.facts import Package

_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
_ELSEWHERE = re.compile(r"""sys_platform\s*(==|!=)\s*["'](\w+)["']""")
_NAME = re.compile(r"[\w.-]+")
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([\d.]+)")
_HOLDS = {
    ">=": lambda order: order >= 0,
    "<=": lambda order: order <= 0,
    "==": lambda order: order == 0,
    "<": lambda order: order < 0,
    ">": lambda order: order > 0,
}


def declared() -> dict[str, tuple[Package, ...]]:
    """Return required packages by extra; "" is the base install. Empty for a copy that was never installed."""
    try:
        return parse_requirements(metadata.requires("roseinfer") or ())
    except metadata.PackageNotFoundError:
        return {}


def parse_requirements(requirements: Iterable[str]) -> dict[str, tuple[Package, ...]]:
    """Parse `torch>=2.11,<3; extra == "x"` and the like; requirements of other platforms are left out."""
    found: dict[str, list[Package]] = {}
    for requirement in requirements:
        wanted, _, marker = requirement.partition(";")
        elsewhere = _ELSEWHERE.search(marker)
        if elsewhere is not None and (elsewhere[1] == "==") != (elsewhere[2] == sys.platform):
            continue
        extra = _EXTRA.search(marker)
        found.setdefault(extra[1] if extra else "", []).append(_package(wanted.strip()))
    return {name: tuple(packages) for name, packages in found.items()}


def _package(wanted: str) -> Package:
    match = _NAME.match(wanted)
    name = match[0] if match else wanted
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Package(name, wanted, None)
    return Package(name, wanted, version, misfit(wanted, version))


def misfit(wanted: str, version: str) -> str | None:
    """Return why a version does not fit, to complete a sentence; None if it fits."""
    for operator, bound in _BOUND.findall(wanted):
        if not _HOLDS[operator](_order(_numbers(version), _numbers(bound))):
            return f"is not {operator}{bound}, which was tested"
    return None


def _numbers(version: str) -> list[int]:
    """Parse the release of a version: 2.11.0+cu128 -> [2, 11, 0]. Ignore what follows a letter, as in 3.0rc1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []


def _order(one: list[int], other: list[int]) -> int:
    """Compare releases: -1, 0 or 1; missing numbers are zero."""
    length = max(len(one), len(other))
    left, right = (numbers + [0] * (length - len(numbers)) for numbers in (one, other))
    return (left > right) - (left < right)
