"""Hook of the documentation's site: adjust pages that are written for a plain git host.

Lists may follow a paragraph without a blank line there, and pages link to files outside docs/. The site shows such a
link as text, unless `repo_url` says where the files are.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *(```+|~~~+)")
ITEM = re.compile(r"^( *)(?:[*+-]|\d+\.) ")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)
    lines: list[str] = []
    fence = ""
    for line in markdown.split("\n"):
        opened = FENCE.match(line)
        if opened and (not fence or line.strip() == fence):
            fence = "" if fence else opened[1]
        elif not fence:
            if ITEM.match(line) and lines and _is_prose(lines[-1]):
                lines.append("")
            line = LINK.sub(lambda link: _outside(link, folder, config), line)
        lines.append(line)
    return "\n".join(lines)


def _is_prose(line: str) -> bool:
    """Return whether a list that follows `line` needs a blank line before it."""
    return bool(line.strip()) and not line.startswith((" ", "|", "#", "```")) and not ITEM.match(line)


def _outside(link: re.Match[str], folder: str, config: Any) -> str:
    text, target = link[1], link[2]
    path = posixpath.normpath(posixpath.join(folder, target))
    if not path.startswith("../"):
        return link[0]
    if config["repo_url"]:
        return f"[{text}]({config['repo_url'].rstrip('/')}/blob/main/{path[3:]})"
    return f"{text} (`{path[3:]}`)" if text.strip("`/") not in path else f"`{path[3:]}`"
