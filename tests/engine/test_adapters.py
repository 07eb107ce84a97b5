"""Adapters of an engine: which folders it reads, and who gets the result."""

import os
from pathlib import Path

import pytest

from roseinfer.adapters.config import CONFIG_FILE
from roseinfer.adapters.reader import WEIGHTS_FILE
from roseinfer.core.adapters import AdapterRead
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.errors import InvalidRequestError, TooManyReadsError
from roseinfer.engine import adapters
from roseinfer.engine.adapters import FOLDER_FILES, AdapterPaths, registry_at_start
from tests.helpers.adapter_files import FakeAdapterFiles, adapter, files_below, registry


def test_only_folders_below_the_directory_are_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "a").mkdir(parents=True)
    (outside / "b").mkdir(parents=True)
    (inside / "link").symlink_to(outside / "b")
    (inside / "alias").symlink_to(inside / "a")
    (tmp_path / "inside2").mkdir()
    paths = AdapterPaths(AdapterConfig(lora_dir=str(inside)))
    assert paths.resolve("a") == paths.resolve(str(inside / "a")) == paths.resolve("alias") == str(inside / "a")
    assert paths.resolve("not/there") == str(inside / "not" / "there")
    bad = (
        str(outside / "b"),
        "link",
        "../outside/b",
        "a/../../outside/b",
        str(inside),
        ".",
        "/",
        str(tmp_path / "inside2"),
    )
    for path in bad:
        with pytest.raises(
            InvalidRequestError, match="is not allowed: only folders and files below --lora-dir are"
        ) as raised:
            paths.resolve(path)
        assert raised.value.param == "path"
    for path in ("", "a\0b", "a" * 5000):
        with pytest.raises(InvalidRequestError, match="invalid adapter path"):
            paths.resolve(path)


def test_without_a_directory_only_the_given_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = AdapterPaths(AdapterConfig(lora=(f"x={tmp_path}/a", "y=relative/b")))
    assert paths.resolve(f"{tmp_path}/a") == f"{tmp_path}/a"
    assert paths.resolve("relative/b") == "relative/b"
    with pytest.raises(InvalidRequestError, match="--lora-dir is not set"):
        paths.resolve(str(tmp_path))


def test_a_link_that_changes_after_the_start_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    paths = AdapterPaths(AdapterConfig(lora=(f"x={tmp_path}/a",)))
    assert paths.resolve(str(tmp_path / "link")) == str(tmp_path / "a")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidRequestError, match="is not allowed"):
        paths.resolve(str(tmp_path / "link"))


def test_links_to_folders_without_a_name_in_unicode_are_not_followed(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    os.symlink(folder, tmp_path / "link")
    with pytest.raises(InvalidRequestError, match="'link' leads to a folder whose name is not UTF-8"):
        AdapterPaths(AdapterConfig(lora_dir=str(tmp_path))).resolve("link")


@pytest.mark.parametrize("name", FOLDER_FILES)
def test_links_of_files_are_not_followed_to_other_places(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    (root / "blobs").mkdir(parents=True)
    (root / "a").mkdir()
    paths = AdapterPaths(AdapterConfig(lora_dir=str(root)))
    (root / "a" / name).symlink_to(root / "blobs" / "file")
    assert paths.resolve("a") == str(root / "a"), "as in the hub's cache"
    (root / "a" / name).unlink()
    (root / "a" / name).symlink_to(tmp_path / "file")
    with pytest.raises(InvalidRequestError, match="is not allowed"):
        paths.resolve("a")


def test_the_checked_files_are_those_that_are_read() -> None:
    assert FOLDER_FILES == (CONFIG_FILE, WEIGHTS_FILE)


def test_a_read_for_a_client_reaches_client_and_scheduler(tmp_path: Path) -> None:
    files = files_below(tmp_path, slow=True, a="content")
    engine = registry(tmp_path, files)
    answers: list[AdapterRead] = []
    engine.read_for("x", "a", answers.append)
    assert engine.pending and not engine.take_read() and not answers
    files.finish()
    (read,) = engine.take_read()
    assert answers == [read] and not engine.pending
    assert read.adapter == adapter("x", "content", "a"), "it keeps the path that was asked for"


def test_a_failed_read_for_a_client_is_not_the_schedulers(tmp_path: Path) -> None:
    files = files_below(tmp_path)
    engine = registry(tmp_path, files)
    answers: list[AdapterRead] = []
    engine.read_for("x", "a", answers.append)
    assert engine.take_read() == []
    assert answers[0].adapter is None and answers[0].error == "no adapter in 'a'", "clients learn no other path"


def test_refused_reads_touch_no_file(tmp_path: Path) -> None:
    files = files_below(tmp_path)
    engine = registry(tmp_path, files)
    answers: list[AdapterRead] = []
    engine.read_for("x", "/etc", answers.append)
    engine.read_for("x\n", "a", answers.append)
    assert ["not allowed" in (answer.error or "") for answer in answers] == [True, False]
    assert not engine.pending, "the scheduler hears nothing of them"
    engine.read("x", "/etc")
    assert engine.pending
    (read,) = engine.take_read()
    assert read.path == "/etc" and "not allowed" in (read.error or "")
    assert not files.asked and not engine.pending


def test_two_paths_to_one_folder_each_get_their_result(tmp_path: Path) -> None:
    files = files_below(tmp_path, a="content")
    engine = registry(tmp_path, files)
    answers: list[AdapterRead] = []
    engine.read("x", str(tmp_path / "a"))
    engine.read_for("x", "a", answers.append)
    assert [read.path for read in engine.take_read()] == [str(tmp_path / "a"), "a"]
    assert [answer.path for answer in answers] == ["a"]


def test_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_READS_COUNT", 1)
    files = files_below(tmp_path, slow=True, a="content")
    engine = registry(tmp_path, files)
    answers: list[AdapterRead] = []
    engine.read_for("x", "a", answers.append)
    with pytest.raises(TooManyReadsError, match="try again later"):
        engine.read_for("y", "a", answers.append)
    assert not answers
    files.finish()
    engine.take_read()
    engine.read_for("y", "a", answers.append)
    assert len(files.asked) == 2


def test_a_copy_that_is_forgotten_while_it_is_read_again_stays(tmp_path: Path) -> None:
    files = files_below(tmp_path, slow=True, a="content", b="other")
    engine = registry(tmp_path, files)
    content, other = adapter(content="content").digest, adapter(content="other").digest
    engine.read("x", "a")
    engine.forget(content)
    engine.forget(other)
    files.finish()
    assert not files.forgotten, "the read may give either"
    assert len(engine.take_read()) == 1 and files.forgotten == [other]
    engine.forget(content)
    assert files.forgotten == [other, content]


def test_a_copy_is_freed_beside_reads_that_begin_later(tmp_path: Path) -> None:
    files = files_below(tmp_path, slow=True, a="content")
    engine = registry(tmp_path, files)
    digest = adapter(content="content").digest
    engine.forget(digest)
    engine.read("x", "a")
    assert files.forgotten == [digest]


def test_adapters_of_the_start_have_their_names() -> None:
    files = FakeAdapterFiles({"one": "1"})
    files.read("x", "one")
    engine = registry_at_start(files, AdapterConfig(lora=("x=one",)))
    assert engine.names.adapters == {"x": adapter("x", "1", "one")}
    assert not engine.pending
