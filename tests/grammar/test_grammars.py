"""Regexes, choices, and grammars in Lark and GBNF."""

import pytest

from roseinfer.grammar.constraint import JSON_OBJECT, Choice, GrammarText, Regex
from roseinfer.grammar.library import GrammarError
from tests.helpers.grammars import accepts, make


@pytest.mark.parametrize(
    ("pattern", "allowed", "forbidden"),
    [
        ("(foo|bar)+", "foobar", "foob"),
        ("^a$", "a", "aa"),
        ("a|bc", "bc", "ac"),
        ("[/x]+\\/a/b", "x/a/b", "x/a-b"),
        ("a\nb\\n", "a\nb\n", "a b"),
        ("é{2}", "éé", "é"),
        ('"a', '"a', "a"),
    ],
)
def test_a_regex_is_matched_as_a_whole(pattern: str, allowed: str, forbidden: str) -> None:
    grammar = make(Regex(pattern)).grammar
    assert accepts(grammar, allowed) and not accepts(grammar, forbidden)


def test_choices_are_literal() -> None:
    choices = ["a", "ab", 'x\ny"\\', "é\x01\x7f", "/re/", "😀", "%json", ""]
    grammar = make(Choice(choices)).grammar
    assert all(accepts(grammar, choice) for choice in choices)
    assert not accepts(grammar, "abc") and not accepts(grammar, "b")


def test_errors_of_a_regex_do_not_show_the_grammar_around_it() -> None:
    with pytest.raises(GrammarError) as raised:
        make(Regex("a["))
    assert raised.value.message.startswith('invalid regex "a["') and "start" not in raised.value.message


LARK = 'start: greeting " " NAME\ngreeting: "Hello" | "Bye"\nNAME: /[A-Z][a-z]+/'
GBNF = 'root ::= greeting " " name\ngreeting ::= "Hello" | "Bye"\nname ::= [A-Z] [a-z]+'


@pytest.mark.parametrize("text", [LARK, GBNF])
def test_grammars_in_lark_and_in_gbnf(text: str) -> None:
    grammar = make(GrammarText(text)).grammar
    assert accepts(grammar, "Hello Ada") and not accepts(grammar, "Hello ada")


def test_white_space_may_come_first_where_models_write_it() -> None:
    for constraint, text in ((JSON_OBJECT, "{}"), (Choice(["no"]), "no"), (GrammarText(LARK), "Bye Ada")):
        grammar = make(constraint, leading_space=True).grammar
        assert all(accepts(grammar, space + text) for space in ("", "\n\n", " \n"))
        assert not accepts(grammar, "\n" * 9 + text)
        assert not accepts(make(constraint).grammar, "\n" + text)


@pytest.mark.parametrize(
    ("constraint", "words", "code"),
    [
        (Regex("("), "unclosed group", "invalid_grammar"),
        (Regex("a(?=b)"), "look-around", "invalid_grammar"),
        (Regex("a" * 8193), "longer than 8192 bytes", "grammar_too_complex"),
        (Choice([]), "list of choices is empty", "invalid_grammar"),
        (Choice(["a"] * 1025), "1025 choices", "grammar_too_complex"),
        (GrammarText('start: "a" b'), "unknown name", "invalid_grammar"),
        (GrammarText('x: "a"'), "no start rule", "invalid_grammar"),
        (GrammarText("start: <no_such_token>"), "unknown special token", "invalid_grammar"),
        (GrammarText('start: A\nA: "a" & "b"'), "no output satisfies", "invalid_grammar"),
        (GrammarText('{"grammars": [{"lark_grammar": "start: /a/"}]}'), "", "invalid_grammar"),
        (GrammarText("start: word\nword[temperature=0.5]: /a/"), "'temperature' of a rule", "invalid_grammar"),
        (GrammarText('start: word "b"\nword[lazy, stop="b"]: /a/'), "'stop' of a rule", "invalid_grammar"),
        (GrammarText('root ::= "a" ('), "Expected ')'", "invalid_grammar"),
        (GrammarText("root ::= other"), "'other' not found", "invalid_grammar"),
        (GrammarText("root ::= " + "(" * 9000), "recursion", "invalid_grammar"),
    ],
)
def test_invalid_grammars_are_rejected(constraint: Regex | Choice | GrammarText, words: str, code: str) -> None:
    with pytest.raises(GrammarError) as raised:
        make(constraint)
    assert words in raised.value.message and raised.value.code == code
