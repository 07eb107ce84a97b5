"""Argument parser of the command line: short and full help, underscores in flags, hints, options of vLLM."""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from roseinfer.config.vllm_names import LISTS, is_switch

VLLM_GIVEN = "vllm_given"  # in the namespace: vLLM's options as (name, value, flag)


class RemovedOption(argparse.Action):
    """Flag that no longer exists. `const` says what to use instead."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs="?", default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} was removed: {self.const}")


class VllmAction(argparse.Action):
    """Option of vLLM that is not ours by name. It is added to `VLLM_GIVEN` with the flag that was used."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        flags, nargs = list(option_strings), "*" if dest in LISTS else None
        if is_switch(dest):
            flags += [flag.replace("--", "--no-", 1) for flag in flags if flag.startswith("--")]
            nargs = 0  # type: ignore[assignment]
        super().__init__(flags, dest, nargs=nargs, default=argparse.SUPPRESS, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert flag is not None
        value = not flag.startswith("--no-") if self.nargs == 0 else values
        given = [*getattr(namespace, VLLM_GIVEN, []), (self.dest, value, flag)]
        setattr(namespace, VLLM_GIVEN, given)


class _HelpWord(argparse.Action):
    """`--help` shows the common options, `--help=all` all, `--help=WORD` those that contain the word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert isinstance(parser, OptionParser)
        word = values or ""
        text = parser.format_help() if word == "all" else parser.format_some_help(word.removeprefix("--"))
        sys.stdout.write(text)
        parser.exit()


class OptionParser(argparse.ArgumentParser):
    """Argument parser that accepts `--max_num_seqs` for `--max-num-seqs` and no abbreviations.

    An unknown option is reported by the command's own parser (`parser` in the namespace), with the most similar option.
    `common`: options that `--help` shows; the others need `--help=all`. `examples`: command lines, which it ends with.
    """

    def __init__(self, *, common: Sequence[str] = (), examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "add_help": not common, **options})
        self._common = common
        self._examples = examples
        if common:
            help = "show these common options; --help=all: all options; --help=WORD: those that contain the word"
            self.add_argument("-h", "--help", action=_HelpWord, nargs="?", metavar="WORD", help=help)
        # What adds options when this parser is first used: building those of all commands takes 0.1 s.
        self.later: list[Callable[[Any], None]] = []

    def format_help(self) -> str:
        return super().format_help() + self._format_examples()

    def format_some_help(self, word: str) -> str:
        """Return the help on the options and groups that contain a word; on the common options for no word."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        if not word:
            formatter.add_text(self.description)
            formatter.start_section("common options")
            shown = [action for action in self._actions if self._is_common(action)]
            formatter.add_arguments(sorted(shown, key=lambda action: bool(action.option_strings)))
            formatter.end_section()
            return formatter.format_help() + self._format_examples()
        for group in self._action_groups:
            formatter.start_section(group.title)
            titled = word.lower() in (group.title or "").lower()
            formatter.add_arguments([one for one in group._group_actions if titled or _has_word(one, word)])
            formatter.end_section()
        found = formatter.format_help()
        return found if "--" in found else f"no option contains {word!r}\n"

    def _is_common(self, action: argparse.Action) -> bool:
        named = action.dest in self._common and action.help != argparse.SUPPRESS
        return named or not action.option_strings or isinstance(action, _HelpWord)

    def _format_examples(self) -> str:
        if not self._examples:
            return ""
        return "\nexamples:\n" + "".join(f"  {example}\n" for example in self._examples)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        while self.later:
            self.later.pop()(self)
        flags = with_dashes(sys.argv[1:] if args is None else args)
        return super().parse_known_args([self._without_key(flag) for flag in flags], namespace)

    def _without_key(self, arg: str) -> str:
        """Shorten `--compilation-config.mode=3`, one key of an option of vLLM, to the option."""
        flag, equals, value = arg.partition("=")
        name = flag.partition(".")[0]
        known = isinstance(self._option_string_actions.get(name), VllmAction)
        return name + equals + value if name != flag and known else arg

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: OptionParser = getattr(known, "parser", self)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{parser._suggestion(unknown[0])}")
        return known

    def _suggestion(self, unknown: str) -> str:
        near = difflib.get_close_matches(unknown.partition("=")[0], self._option_string_actions, 1)
        return f"; did you mean {near[0]}?" if near else ""


def _has_word(action: argparse.Action, word: str) -> bool:
    texts = (*action.option_strings, action.help or "")
    return action.help != argparse.SUPPRESS and any(word.lower() in text.lower() for text in texts)


def with_dashes(args: Iterable[str]) -> list[str]:
    """Replace underscores in flags: `--max_num_seqs=8` -> `--max-num-seqs=8`. Values, and arguments after `--`, stay as
    they are.
    """
    changed, flags = [], True
    for arg in args:
        flags = flags and arg != "--"
        name, equals, value = arg.partition("=")
        changed.append(name.replace("_", "-") + equals + value if flags and arg.startswith("--") else arg)
    return changed
