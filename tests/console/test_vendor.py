"""The libraries that are not ours: as they were published, with their licences."""

import hashlib
import re

from roseinfer.server.console.files import FOLDER

VENDOR = FOLDER / "vendor"


def test_every_file_is_as_it_was_published() -> None:
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    expected = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["SHA256SUMS"]
    assert found == expected


def test_each_library_has_its_licence() -> None:
    licences = {path.name: path.read_text() for path in VENDOR.glob("LICENSE.*")}
    assert "Apache License" in licences["LICENSE.htm.txt"]
    for name in ("LICENSE.preact.txt", "LICENSE.uplot.txt"):
        assert "MIT" in licences[name]


def test_our_own_files_need_nothing_from_elsewhere() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in (".js", ".html", ".css"):
            text = path.read_text()
            assert not re.search(r"https?://", text), path.name
            assert not re.search(r"\beval\(|new Function\(|innerHTML|dangerouslySetInnerHTML", text), path.name
            for module in re.findall(r'from "(.+?)"', text):
                assert (FOLDER / module).is_file(), (path.name, module)


def test_the_page_has_no_inline_script_or_style() -> None:
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)", text)
    assert "<style" not in text and not re.search(r'\s(style|on\w+)="', text)
