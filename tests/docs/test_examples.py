"""Sessions on the pages (`pycon` blocks): each answer is what the code gives."""

import doctest

import pytest

from tests.docs.blocks import blocks

SESSIONS: dict[str, list[str]] = {}
for block in blocks():
    if block.language == "pycon":
        SESSIONS.setdefault(block.page, []).append(block.text)


@pytest.mark.parametrize("page", SESSIONS)
def test_sessions_give_what_the_page_shows(page: str) -> None:
    session = doctest.DocTestParser().get_doctest("\n".join(SESSIONS[page]), {}, page, page, 0)
    report = list[str]()
    doctest.DocTestRunner().run(session, out=report.append)
    assert not report, "".join(report)


def test_the_step_of_slack_is_worked_out() -> None:
    assert "docs/explanation/slack.md" in SESSIONS
