"""Tokens that a guide of messages allows: headers follow a grammar, and only answers and calls are constrained."""

import pytest

from roseinfer.core.guide import Trigger
from tests.helpers.tokenizers import EOS_ID
from tests.helpers.writing import CALL, PAIR, THINK, THOUGHT, VOCAB, Writing, framing

BODY = 'start: "{" /[a-z]{1,3}/ "}"'
EVERY = set(range(VOCAB))
FREE = EVERY - {EOS_ID, THINK, CALL, ord("#")}


def header(channel: str) -> list[int]:
    return [*b"#", *channel.encode(), CALL]


def test_reasoning_and_other_messages_are_free():
    output = Writing(framing=framing())
    assert output.allowed() == {*b"#"}
    assert output.say("#").allowed() == {*b"tofc"}
    for channel in "tof":
        output = Writing(framing=framing()).say(header(channel)).say("{free")
        assert output.allowed() is None and not output.ended
        assert output.say([THOUGHT]).allowed() == {THINK}
        assert output.say([THINK]).allowed() == {*b"a"}


def test_arguments_of_a_call_follow_its_grammar_and_end_the_output():
    output = Writing(framing=framing()).say(header("t")).say([THOUGHT, THINK, *b"a", *header("c")])
    assert output.allowed() == {*b"{"}
    assert not output.say("{ab").ended
    assert output.say("}").ended


def test_the_constraint_applies_to_the_answer_alone():
    output = Writing(framing=framing(must_answer=True), grammar=BODY)
    assert output.say("#").allowed() == {*b"tfc"}
    output.say("t").say([CALL])
    assert output.allowed() == FREE, "no end, and no other message within this one"
    output.say("{text").say([THOUGHT, THINK, *b"a", *header("f")])
    assert output.allowed() == {*b"{"}
    assert not output.say("{ab").ended and output.say("}").ended


def test_triggers_apply_to_the_answer_alone():
    spec = {"triggers": (Trigger(grammar=BODY, text="<f>"),), "ends_after": 1}
    output = Writing(framing=framing(), **spec).say(header("t")).say("<f>")
    assert output.allowed() is None
    output.say([THOUGHT, THINK, *b"a", *header("f")]).say("so <f>")
    assert output.allowed() == {*b"{"} and output.say("{a}").ended


def test_an_answer_without_a_constraint_may_be_followed_by_messages():
    output = Writing(framing=framing()).say(header("f")).say("text").say([THOUGHT])
    assert output.allowed() == {THINK}


@pytest.mark.parametrize("lost", [[], [THINK, *b"a"], [THOUGHT, THINK, *b"a"]], ids=["all", "end", "nothing"])
def test_a_header_may_begin_anywhere_in_free_text(lost: list[int]):
    """The end of the message is missing, or also the beginning of the next."""
    output = Writing(framing=framing()).say(header("t")).say("text").say(lost).say("#")
    assert output.allowed() == {*b"tofc"}
    assert output.say("c").say([CALL]).allowed() == {*b"{"}


def test_the_prompt_may_leave_a_message_open_anywhere():
    assert Writing(framing=framing(begun=None)).allowed() == {THINK}
    assert Writing(framing=framing(begun="a#")).allowed() == {*b"tofc"}
    for channel, allowed in (("t", FREE), ("f", {*b"{"}), ("c", {*b"{"})):
        whole = framing(must_answer=True)
        begun = (THINK, *b"a", *header(channel))
        made = type(whole)(**{name: getattr(whole, name) for name in whole.__slots__} | {"begun": begun})
        assert Writing(framing=made, grammar=BODY).allowed() == allowed


def test_any_header_may_follow_one_that_the_prompt_begins_against_the_grammar():
    output = Writing(framing=framing(begun="user", must_answer=True), grammar=BODY)
    assert output.allowed() is None
    assert output.say(header("f")).allowed() == {*b"{"}
    output = Writing(framing=framing(begun="user")).say("nothing").say([THOUGHT])
    assert output.allowed() == {THINK}


def test_a_budget_ends_the_reasoning_and_there_is_no_more():
    output = Writing(framing=framing(budget=3)).say(header("t")).say("abc")
    for token in (*b"so", THOUGHT):
        assert output.allowed() == {token}
        output.say([token])
    assert output.say([THINK, *b"a#"]).allowed() == {*b"ofc"}
    output.say("o").say([CALL]).say("this is not counted").say([THOUGHT, THINK, *b"a#"])
    assert output.allowed() == {*b"ofc"}


def test_a_budget_is_for_all_of_the_reasoning():
    output = Writing(framing=framing(budget=3)).say(header("t")).say("ab").say([THOUGHT, THINK, *b"a", *header("t")])
    assert output.allowed() is None
    assert output.say("c").allowed() == {*b"s"}


def test_a_budget_of_nothing_leaves_no_reasoning():
    assert Writing(framing=framing(budget=0)).say("#").allowed() == {*b"ofc"}


def test_forced_tokens_are_those_that_masks_leave():
    output = Writing(framing=framing(budget=1))
    assert (*output.guide.forced(9),) == (*b"#",)
    output.say(header("t")).say("x")
    assert (*output.guide.forced(2),) == (*b"so",)
    output.say("so").say([THOUGHT])
    assert (*output.guide.forced(9),) == (THINK, *b"a#")


def test_a_token_of_several_characters_is_part_of_a_channel():
    output = Writing(framing=framing(begun="user")).say("#").say([PAIR]).say([CALL])
    assert output.allowed() is None, "another channel"
