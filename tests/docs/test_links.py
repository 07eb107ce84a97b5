"""Links of the repository's pages, and the names of pages in code and messages."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MENTION = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png)\b")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@cache
def tracked() -> list[Path]:
    try:
        names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in names.split("\n") if name and (path := ROOT / name).is_file()]


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^(```+|~~~+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    found: set[str] = set()
    for heading in HEADING.findall(prose(page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def broken(page: Path) -> list[str]:
    problems = []
    for target in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            problems.append(f"{page.relative_to(ROOT)}: {target} does not exist")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            problems.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
    return problems


def test_links_of_pages():
    pages = [path for path in tracked() if path.suffix == ".md"]
    assert [problem for page in pages for problem in broken(page)] == []


def test_code_and_messages_name_pages_that_exist():
    problems = []
    for path in tracked():
        if path.suffix not in (".py", ".sh", ".toml", ".yml", ".yaml", ".service", ".md", ".js", ".html"):
            continue
        for name in MENTION.findall(path.read_text(encoding="utf-8")):
            if not (ROOT / name).exists():
                problems.append(f"{path.relative_to(ROOT)}: {name}")
    assert problems == []
