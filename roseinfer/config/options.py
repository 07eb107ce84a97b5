"""Command-line options generated from frozen dataclasses, and configs built from options.

A field `max_num_seqs: int = option(256, "...")` becomes `--max-num-seqs N`, shown with its default; `--max_num_seqs` is
accepted too. A bool becomes `--x` and `--no-x`; a tuple may be given several times. A flag overrides the file of
`--config`, which overrides the default.
"""

import argparse
import dataclasses
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from roseinfer.config.file import load_file
from roseinfer.config.parser import VLLM_GIVEN, OptionParser, RemovedOption, VllmAction
from roseinfer.config.readers import ChoicesOrDefault, WordReader, flag_of, reader, type_name
from roseinfer.config.vllm_names import VLLM_OPTIONS, VllmOption, Works
from roseinfer.config.vllm_options import Translation, split_list
from roseinfer.core.config.option import check_writable
from roseinfer.core.errors import ConfigError

Config = TypeVar("Config")

CONFIG_FILE = "config_file"
_METAVARS = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True, slots=True)
class Group:
    """Options of one dataclass on a command line.

    `positional` names the field that may also be given without a flag; `skip` names fields that are not options here.
    `help`, `defaults` and `choices` replace what the fields declare.
    """

    kind: type[Any]
    title: str
    positional: str | None = None
    skip: frozenset[str] = frozenset()
    help: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def options(self) -> list["Option"]:
        hints = typing.get_type_hints(self.kind)
        return [self._option(f, hints[f.name]) for f in dataclasses.fields(self.kind) if f.name not in self.skip]

    def _option(self, f: "dataclasses.Field[Any]", hint: Any) -> "Option":
        default = self.defaults.get(f.name, f.default)
        text = self.help.get(f.name) or f.metadata.get("help", "")
        base, optional = _without_none(hint)
        many = typing.get_origin(base) is tuple and typing.get_args(base)[1:] == (...,)
        return Option(
            name=f.name,
            type=typing.get_args(base)[0] if many else base,
            many=many,
            optional=optional,
            default=default,
            help=text,
            choices=tuple(self.choices.get(f.name) or f.metadata.get("choices") or ()),
            metavar=f.metadata.get("metavar"),
            aliases=tuple(f.metadata.get("aliases") or ()),
            spaced=bool(f.metadata.get("spaced")),
            written=bool(f.metadata.get("written")),
            secret=not f.repr,
        )


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `type` is the type of one value. A `many` option takes several values, each after its own flag, or
    after one flag if `spaced`. `written`: its file is written at the end. `secret`: no message may show its values.
    """

    name: str
    type: Any
    many: bool
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    metavar: str | None
    aliases: tuple[str, ...] = ()
    spaced: bool = False
    written: bool = False
    secret: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def flags(self) -> list[str]:
        return [self.flag, *map(flag_of, self.aliases)]

    def add_to(self, group: "argparse._ArgumentGroup", hidden: Sequence[str] = ()) -> None:
        """Add the option to a parser. An option that is not given is absent from the namespace, so that the config file
        can provide it. `hidden`: further flags, which the help does not show.
        """
        self._add(group, self.flags, self._described())
        if hidden:
            self._add(group, hidden, argparse.SUPPRESS)

    def _add(self, group: "argparse._ArgumentGroup", flags: Sequence[str], help: str) -> None:
        common: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": help}
        if self.type is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
            return
        common["action"] = "append" if self.many else "store"
        if self.spaced:
            common["nargs"] = "+"
        if self.choices:
            group.add_argument(
                *flags, type=WordReader(self.name, str), choices=ChoicesOrDefault(self.choices), **common
            )
        else:
            read = WordReader(self.name, reader(self.type))
            group.add_argument(*flags, type=read, metavar=self._metavar(), **common)

    def is_pair(self, value: str) -> bool:
        """True if the option takes values of the form NAME=PATH, and this is one."""
        return "=" in (self.metavar or "") and "=" in value and "/" not in value.partition("=")[0]

    def values(self, found: Any) -> Any:
        """Return the value of what the parser found; for a `many` option, of all its flags."""
        if not self.many:
            return found
        values = [value for one in found for value in (one if self.spaced else [one])]
        if self.name in VLLM_OPTIONS and self.type is str:
            values = [value for text in values for value in split_list(text)]
        return tuple(values)

    def from_file(self, value: Any) -> Any:
        """Convert a value of the config file to the field's type. Raises `ConfigError` for any other type."""
        if value is None and self.optional:
            return None
        if self.many and isinstance(value, list):
            return tuple(self._one(item) for item in value)
        return (self._one(value),) if self.many else self._one(value)

    def as_in_file(self, value: Any) -> Any:
        """Return the config file's value of which `from_file` makes this one."""
        if self.many:
            return [self._as_text(item) if isinstance(item, tuple) else item for item in value]
        return self._as_text(value) if isinstance(value, tuple) else value

    def as_flags(self, value: Any) -> list[str]:
        """Return the command-line arguments that give the option this value; none for None."""
        if value is None:
            return []
        if self.type is bool:
            return [self.flag if value else self.flag.replace("--", "--no-", 1)]
        return [f"{self.flag}={self._as_text(item)}" for item in (value if self.many else (value,))]

    def _as_text(self, value: Any) -> str:
        return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def _one(self, value: Any) -> Any:
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if self.type in (int, bool, float, str) and type(value) is self.type:
            return value
        if self.type is not bool and self.type is not str and isinstance(value, str):
            try:
                return reader(self.type)(value)
            except ValueError:
                pass
        raise ConfigError(f"{self.name}: invalid value {value!r} (expected {type_name(self.type)})")

    def _described(self) -> str:
        text = self.help
        if self.default not in (None, (), "") and self.default is not dataclasses.MISSING and "default:" not in text:
            shown = {True: "on", False: "off"}[self.default] if isinstance(self.default, bool) else self.default
            text = f"{text} (default: {shown})".lstrip()
        return text.replace("%", "%%")

    def _metavar(self) -> str:
        return self.metavar or _METAVARS.get(self.type, "ID:VALUE")


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """Options of one of several models. `name`: of its table; None for a positional value."""

    name: str | None
    options: Mapping[str, Any]


class OptionSet:
    """Options of one command. `removed` maps former options to what replaces them; they are rejected by name.

    `vllm`: accept all options of `vllm serve`, too (`config/vllm_names.py`). `tables`: key of config files, below which
    each table has the options of one model. `read` returns a list of `OwnOptions` under that key: one for each table,
    or for each of several positional values.
    """

    def __init__(
        self,
        *groups: Group,
        config_file: bool = True,
        removed: Mapping[str, str] | None = None,
        vllm: bool = False,
        tables: str | None = None,
    ) -> None:
        self.groups = groups
        self.tables = tables
        self.config_file = config_file
        self.removed = removed or {}
        self.vllm = vllm
        self.options = {option.name: option for group in groups for option in group.options()}
        assert len(self.options) == sum(len(group.options()) for group in groups), "an option has one home"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        if self.config_file:
            parser.add_argument(
                "--config",
                dest=CONFIG_FILE,
                metavar="FILE",
                help="TOML, JSON or YAML file with options by name; flags override it",
            )
        for group in self.groups:
            if group.positional is not None:
                option = self.options[group.positional]
                help = option._described()
                nargs = "?" if self.tables is None else "*"
                parser.add_argument(
                    _positional(group.positional), nargs=nargs, metavar=option._metavar(), default=None, help=help
                )
            section = parser.add_argument_group(group.title)
            for option in group.options():
                known = VLLM_OPTIONS.get(option.name) if self.vllm else None
                option.add_to(section, [flag for flag in (known.short if known else ()) if flag not in option.flags])
        if self.vllm and isinstance(parser, OptionParser):
            parser.later.append(self._add_vllm)
        for name, instead in self.removed.items():
            parser.add_argument(flag_of(name), action=RemovedOption, const=instead, help=argparse.SUPPRESS)

    def _add_vllm(self, parser: argparse.ArgumentParser) -> None:
        """Add vLLM's options that are not ours by name. The help does not show them."""
        for name, option in VLLM_OPTIONS.items():
            if self._is_foreign(name, option):
                flags = [flag_of(name), *option.short]
                parser.add_argument(*flags, action=VllmAction, dest=name, help=argparse.SUPPRESS)

    def _is_foreign(self, name: str, option: VllmOption) -> bool:
        if name in self.options or name == "config":
            return False
        return not isinstance(option, Works) or option.ours in self.options

    def resolve(self, name: str) -> str:
        """Return the name of the option with this name or alias; `name` itself if there is none."""
        return next((option.name for option in self.options.values() if name in option.aliases), name)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the options that were given by flag or in the file. Raises `ConfigError`, also for a file that cannot
        be written: better now than after a long run.
        """
        several = self._several(args)
        path = getattr(args, CONFIG_FILE, None)
        given = self._read_file(Path(path)) if path is not None else {}
        given |= self._read_vllm(getattr(args, VLLM_GIVEN, []))
        for group in self.groups:
            if group.positional is not None and not several:
                self._move_last_value(group.positional, args, given)
        for name, option in self.options.items():
            if hasattr(args, name):
                given[name] = option.values(getattr(args, name))
        for group in self.groups:
            if group.positional is not None:
                self._add_positional(group.positional, args, given)
        if several and self.tables is not None:
            if self.tables in given:
                raise ConfigError(f"{self.tables} are given twice: on the command line and in the config file")
            given[self.tables] = several
        for name, value in given.items():
            if value and name in self.options and self.options[name].written:
                check_writable(name, value)
        return given

    def _several(self, args: argparse.Namespace) -> list[OwnOptions]:
        """Return the options of several positional values. A single one stays in `args`. Raises `ConfigError`."""
        for group in self.groups if self.tables is not None else ():
            name = group.positional
            if name is None:
                continue
            values = getattr(args, _positional(name)) or []
            setattr(args, _positional(name), values[0] if len(values) == 1 else None)
            if len(values) > 1:
                if hasattr(args, name):
                    raise ConfigError(f"{name} is given twice: {' '.join(values)} and {getattr(args, name)!r}")
                return [OwnOptions(None, {name: value}) for value in values]
        return []

    def _read_vllm(self, found: Iterable[tuple[str, Any, str]]) -> dict[str, Any]:
        """Return our options for those of vLLM. Print a line about each that is ignored."""
        translation = Translation()
        for name, value, flag in found:
            translation.add(name, value, flag)
        for note in translation.notes:
            print(f"roseinfer: note: {note}", file=sys.stderr)
        return {name: self.options[name].from_file(value) for name, value in translation.options.items()}

    def _move_last_value(self, positional: str, args: argparse.Namespace, given: Mapping[str, Any]) -> None:
        """Make the last of several spaced values the positional option, which may follow them, if nothing else is."""
        if getattr(args, _positional(positional)) is not None or hasattr(args, positional) or positional in given:
            return
        spaced = [option for name, option in self.options.items() if option.spaced and hasattr(args, name)]
        found = [(option, values) for option in spaced for values in getattr(args, option.name)]
        several = [(one, values) for one, values in found if len(values) > 1 and not one.is_pair(values[-1])]
        if not several:
            return
        option, values = several[-1]
        if option.secret and values[-1] != self.options[positional].default and not os.path.exists(values[-1]):
            problem = f"{option.name} has several values, the last of which may be the {positional}"
            raise ConfigError(f"{problem}: put the {positional} first, or {option.flag} before each value")
        setattr(args, _positional(positional), values.pop())

    def build(self, kind: type[Config], given: Mapping[str, Any]) -> Config:
        """Build the dataclass `kind` from the given options and the defaults. Raises what the dataclass raises."""
        group = next(group for group in self.groups if group.kind is kind)
        names = {option.name for option in group.options()}
        values = {**group.defaults, **given}
        return kind(**{name: value for name, value in values.items() if name in names})

    def with_flags(self, message: str) -> str:
        """Replace the names of fields in an error message by their flags; names of files stay.

        A name of one word may be an ordinary word: it counts only where the message begins, and before `=`.
        """
        for name, option in self.options.items():
            named = name if "_" in name else f"^{name}|(?<= ){name}(?==)"
            message = re.sub(rf"(?<![-./\w])(?:{named})\b(?!\.\w)", option.flag, message)
        return message

    def _add_positional(self, name: str, args: argparse.Namespace, given: dict[str, Any]) -> None:
        value = getattr(args, _positional(name))
        if value is None:
            return
        if hasattr(args, name) and getattr(args, name) != value:
            raise ConfigError(f"{name} is given twice: {value!r} and {getattr(args, name)!r}")
        given[name] = value

    def _read_file(self, path: Path) -> dict[str, Any]:
        found = load_file(path)
        tables = None if self.tables is None else found.pop(self.tables, None)
        given = self.read_values(found, str(path))
        if tables is not None:
            given[str(self.tables)] = self._read_tables(tables, f"{path}: {self.tables}")
        return given

    def _read_tables(self, tables: Any, source: str) -> list[OwnOptions]:
        if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
            raise ConfigError(f"{source} must have a table for each name, such as [{self.tables}.NAME]")
        return [OwnOptions(name, self.read_values(table, f"{source}.{name}")) for name, table in tables.items()]

    def read_values(self, found: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return the options in a mapping such as a config file. Raises `ConfigError` that names `source`."""
        values, of_vllm = {}, []
        for key, value in found.items():
            name = self.resolve(key.replace("-", "_"))
            if self._has_row(name):
                of_vllm.append((name, value, key))
                continue
            if name in self.removed:
                raise ConfigError(f"{source}: option {key!r} was removed: {self.removed[name]}")
            if name not in self.options:
                raise ConfigError(f"{source}: unknown option {key!r}")
            try:
                values[name] = self.options[name].from_file(value)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from error
        try:
            return self._read_vllm(of_vllm) | values
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    def _has_row(self, name: str) -> bool:
        """Return True if vLLM's table says what this option of a file means."""
        option = VLLM_OPTIONS.get(name)
        if option is None or name in self.options:
            return isinstance(option, Works)
        return self.vllm and self._is_foreign(name, option)


def _positional(name: str) -> str:
    return f"positional_{name}"


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Split off None: `int | None` -> (int, True)."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    rest = [part for part in typing.get_args(hint) if part is not types.NoneType]
    assert len(rest) == 1, f"an option has one type, not {hint}"
    return rest[0], True
