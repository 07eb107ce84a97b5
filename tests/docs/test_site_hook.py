"""The hook that adjusts pages for the site (.ci/docs_hook.py)."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def adjust() -> Callable[..., str]:
    hook = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "docs_hook.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/deploy.md"))

    def call(text: str, repo_url: str = "") -> str:
        return hook(text, page=page, config={"repo_url": repo_url})

    return call


def test_a_list_may_follow_a_paragraph(adjust: Callable[..., str]) -> None:
    assert adjust("It is:\n* one\n* two") == "It is:\n\n* one\n* two"
    assert adjust("* one\n  more\n* two") == "* one\n  more\n* two"
    assert adjust("```\ntext:\n* no list\n```") == "```\ntext:\n* no list\n```"


def test_links_out_of_docs(adjust: Callable[..., str]) -> None:
    assert adjust("see [the rules](../../deploy/rules.yml#x)") == "see the rules (`deploy/rules.yml`)"
    assert adjust("in [deploy/](../../deploy)") == "in `deploy`"
    assert adjust("[rules](../../deploy/rules.yml)", "https://host/a/b") == (
        "[rules](https://host/a/b/blob/main/deploy/rules.yml)"
    )
    inside = "[one](serve.md#running-it), [two](../index.md), [three](https://host/), ![four](../img/x.png)"
    assert adjust(inside) == inside
