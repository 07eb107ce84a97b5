"""Tokens that a `GuideSpec` allows, step by step."""

import pytest

from roseinfer.core.guide import GuideSpec, Thinking, Trigger
from tests.helpers.tokenizers import EOS_ID
from tests.helpers.writing import CALL, PAIR, THINK, THOUGHT, VOCAB, Writing

BODY = 'start: "{" /[a-z]{1,3}/ "}"'
EVERY = set(range(VOCAB))
IN_CALL = Trigger(grammar=BODY, token_id=CALL)


def test_a_grammar_holds_from_the_start_and_ends_the_output():
    output = Writing(grammar=BODY)
    assert output.allowed() == {*b"{"}
    assert not output.say("{ab").ended
    assert output.allowed() == {*b"abcdefghijklmnopqrstuvwxyz}"}
    assert output.say("}").ended


def test_an_end_that_the_grammar_allows_is_one():
    output = Writing(grammar='start: "a" "b"?')
    output.say("a")
    assert output.allowed() == {ord("b"), EOS_ID}
    assert output.say([EOS_ID]).ended


def test_text_is_free_around_a_grammar_that_a_token_triggers():
    output = Writing(triggers=(IN_CALL,))
    assert output.say("some {text").allowed() is None
    assert output.say([CALL]).allowed() == {*b"{"}
    assert output.say("{a}").allowed() is None and not output.ended
    assert output.say("more").say([CALL]).say("{b}").allowed() is None


@pytest.mark.parametrize("most", [1, 2])
def test_the_output_ends_after_the_given_number_of_triggered_grammars(most: int):
    output = Writing(triggers=(IN_CALL,), ends_after=most)
    for _ in range(most):
        assert not output.say("text").say([CALL]).say("{a").ended
        output.say("}")
    assert output.ended


def test_text_is_free_after_a_triggered_grammar_that_only_the_mask_shows_complete():
    """The grammar would allow more text, but no token can continue it."""
    trigger = Trigger(grammar='start: "a" more?\nmore: MORE\nMORE: /b/ & /c/', token_id=CALL)
    assert Writing(grammar=trigger.grammar).say("a").allowed() == {EOS_ID}
    output = Writing(triggers=(trigger,)).say([CALL]).say("a")
    assert output.allowed() == EVERY and not output.ended
    assert output.allowed() is None
    output = Writing(triggers=(trigger,), ends_after=1).say([CALL]).say("a")
    assert output.allowed() == EVERY and output.ended


def test_a_text_triggers_a_grammar_at_any_token_boundaries():
    output = Writing(triggers=(Trigger(grammar=BODY, text="<f>"),))
    assert output.say("a <f f> <<f").allowed() is None
    assert output.say(">").allowed() == {*b"{"}
    assert output.say("{a} <f").allowed() is None
    assert output.say(">").allowed() == {*b"{"}


def test_bytes_of_a_token_after_a_trigger_belong_to_the_grammar():
    output = Writing(triggers=(Trigger(grammar=BODY, text="<f>"),))
    output.say("<f").say([PAIR])
    assert output.allowed() == {*b"abcdefghijklmnopqrstuvwxyz"}
    assert output.say("a}").allowed() is None


def test_a_token_whose_rest_violates_the_grammar_triggers_nothing():
    output = Writing(triggers=(Trigger(grammar='start: "x"', text="<f>"),))
    assert output.say("<f").say([PAIR]).allowed() is None
    assert output.say("f>").allowed() is None, "and it is not found again in what was said"
    assert output.say("<f>").allowed() == {*b"x"}


def test_of_several_triggers_the_one_that_ends_first_counts_then_the_longest():
    triggers = (
        Trigger(grammar='start: "1"', text="ab"),
        Trigger(grammar='start: "2"', text="abc"),
        Trigger(grammar='start: "3"', text="xxab"),
        Trigger(grammar='start: "4"', token_id=CALL),
    )
    assert Writing(triggers=triggers).say("ab").allowed() == {*b"1"}
    assert Writing(triggers=triggers).say("xxab").allowed() == {*b"3"}
    assert Writing(triggers=triggers).say("a").say([CALL]).allowed() == {*b"4"}


@pytest.mark.parametrize("before", ["", " \n"])
def test_a_trigger_at_the_start_matches_as_the_first_output(before: str):
    by_text = Trigger(grammar='start: "x"', text="{n", at_start=True)
    by_token = Trigger(grammar='start: "y"', token_id=CALL, at_start=True)
    for triggers in [(by_text, by_token), (by_token, by_text)]:
        assert Writing(triggers=triggers).say(before + "{n").allowed() == {*b"x"}
        assert Writing(triggers=triggers).say(before).say([CALL]).allowed() == {*b"y"}


@pytest.mark.parametrize("before", ["a", "{", "{a", "{ n"])
def test_a_trigger_at_the_start_does_not_match_after_other_output(before: str):
    triggers = (
        Trigger(grammar='start: "x"', text="{n", at_start=True),
        Trigger(grammar='start: "y"', token_id=CALL, at_start=True),
    )
    assert Writing(triggers=triggers).say(before + " {n").allowed() is None
    assert Writing(triggers=triggers).say(before).say([CALL]).allowed() is None


def test_banned_tokens_are_never_allowed():
    output = Writing(banned=(CALL, ord("b")))
    assert output.allowed() == EVERY - {CALL, ord("b")}
    assert output.guide.ignores_output, "it need not see what is said"
    output = Writing(grammar=BODY, banned=(CALL, ord("b")))
    assert output.say("{").allowed() == {*b"acdefghijklmnopqrstuvwxyz"}
    output = Writing(triggers=(IN_CALL,), banned=(ord("b"),))
    assert not output.guide.ignores_output
    assert output.say("a").allowed() == EVERY - {ord("b")}
    assert output.say([CALL]).say("{a").allowed() == {*b"acdefghijklmnopqrstuvwxyz}"}


def thinking(inside: bool = True, begin=(THINK,), end=(THOUGHT,), **more) -> Thinking:
    return Thinking(inside=inside, begin=begin, end=end, **more)


def test_a_grammar_begins_after_the_reasoning():
    output = Writing(grammar=BODY, thinking=thinking())
    assert output.say("well, {").allowed() == EVERY - {EOS_ID}, "there is no end before the document"
    assert output.say([THOUGHT]).allowed() == {*b"{"}
    assert output.say("{a}").ended


def test_reasoning_may_begin_before_any_other_output():
    output = Writing(grammar=BODY, thinking=thinking(inside=False))
    assert output.allowed() == {*b"{", THINK}
    assert output.say([THINK]).say("hm").allowed() == EVERY - {EOS_ID}
    assert output.say([THOUGHT]).allowed() == {*b"{"}
    output = Writing(grammar=BODY, thinking=thinking(inside=False)).say("{")
    assert THINK not in output.allowed()
    output = Writing(grammar=BODY, thinking=thinking(inside=False, begin=()))
    assert output.allowed() == {*b"{"}


def test_reasoning_may_end_with_several_tokens():
    output = Writing(grammar=BODY, thinking=thinking(end=(*b"[/]",)))
    assert output.say("[/ [/").allowed() == EVERY - {EOS_ID}
    assert output.say("]").allowed() == {*b"{"}


def test_banned_tokens_are_banned_in_reasoning_too():
    output = Writing(grammar=BODY, thinking=thinking(), banned=(CALL,))
    assert output.say("a").allowed() == EVERY - {EOS_ID, CALL}


def test_in_free_text_reasoning_may_begin_again_and_triggers_nothing():
    output = Writing(triggers=(IN_CALL,), thinking=thinking())
    assert output.say("a").say([CALL, THOUGHT]).say("b").say([THINK, CALL]).allowed() is None
    assert output.say([THOUGHT, CALL]).allowed() == {*b"{"}


@pytest.mark.parametrize("inside", [True, False])
def test_a_used_up_budget_forces_the_last_words(inside: bool):
    words = (*b"so.", THOUGHT)
    output = Writing(grammar=BODY, thinking=thinking(inside, budget=3, last_words=words))
    if not inside:
        output.say([THINK])
    assert output.say("abc").ended is False
    for word in words:
        assert output.allowed() == {word}
        output.say([word])
    assert output.allowed() == {*b"{"}


def test_a_budget_of_0_ends_reasoning_at_once():
    output = Writing(grammar=BODY, thinking=thinking(budget=0))
    assert output.allowed() == {THOUGHT}
    assert output.say([THOUGHT]).say("{a}").ended


def test_reasoning_within_its_budget_has_no_last_words():
    output = Writing(grammar=BODY, thinking=thinking(budget=3, last_words=(*b"so.", THOUGHT)))
    assert output.say("ab").say([THOUGHT]).allowed() == {*b"{"}


def test_a_budget_is_for_all_reasoning_of_an_output():
    output = Writing(thinking=thinking(budget=4)).say("abc").say([THOUGHT]).say("text").say([THINK])
    assert output.allowed() == {THOUGHT}, "three thoughts, and the end of thinking is one"
    assert output.say([THOUGHT]).allowed() is None


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (GuideSpec(), False),
        (GuideSpec(thinking=thinking()), False),
        (GuideSpec(thinking=thinking(budget=0)), True),
        (GuideSpec(grammar=BODY), True),
        (GuideSpec(triggers=(IN_CALL,)), True),
        (GuideSpec(banned=(CALL,)), True),
    ],
)
def test_a_spec_without_constraints_needs_no_guide(spec: GuideSpec, wanted: bool):
    assert spec.constrains is wanted
