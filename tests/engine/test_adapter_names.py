"""Names of adapters: whatever the order of messages, all processes agree."""

from itertools import permutations

import pytest

from roseinfer.core.adapters import MAX_NAME_CHARS
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.errors import ConfigError, InvalidRequestError
from roseinfer.engine import adapter_names
from roseinfer.engine.adapter_names import AdapterEntry, AdapterNames, check_adapter_name
from tests.helpers.adapter_files import adapter


def test_a_name_takes_new_content_and_is_dropped() -> None:
    names = AdapterNames([adapter("a", "old")])
    assert names.adapters == {"a": adapter("a", "old")}
    names.set("a", adapter("a", "new"))
    assert names.find("a") == adapter("a", "new")
    names.set("a", None)
    assert not names.adapters
    with pytest.raises(InvalidRequestError, match="no LoRA adapter is named 'a'") as raised:
        names.find("a")
    assert raised.value.code == "adapter_not_found"


def test_the_same_content_is_no_news() -> None:
    names = AdapterNames()
    assert names.set("a", adapter("a"))
    assert not names.set("a", adapter("a"))
    assert not names.merge(names.entries)


def test_messages_in_any_order_end_with_the_same_names() -> None:
    changes: list[dict[str, AdapterEntry]] = [
        {"a": AdapterEntry(0, adapter("a", "at the start"))},
        {"a": AdapterEntry(1, adapter("a", "of one client"))},
        {"a": AdapterEntry(1, adapter("a", "of another client at the same time"))},
        {"b": AdapterEntry(1, adapter("b")), "c": AdapterEntry(2, None)},
        {"c": AdapterEntry(1, adapter("c"))},
    ]
    ends = []
    for order in permutations(changes):
        names = AdapterNames()
        for change in order:
            names.merge(change)
        ends.append((names.entries, names.adapters))
    assert all(end == ends[0] for end in ends)
    assert set(ends[0][1]) == {"a", "b"}


def test_a_dropped_name_does_not_come_back_with_a_restarted_engine() -> None:
    client = AdapterNames([adapter("a")])
    client.set("a", None)
    restarted = AdapterNames([adapter("a")])
    client.merge(restarted.entries)
    restarted.merge(client.entries)
    assert not client.adapters and not restarted.adapters


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_NAMES_COUNT", 1)
    names = AdapterNames([adapter("a")])
    names.set("a", adapter("a", "new"))
    with pytest.raises(InvalidRequestError, match="names of adapters"):
        names.set("b", adapter("b"))


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\0b", "\x1b[2J", "a" * (MAX_NAME_CHARS + 1)])
def test_invalid_names(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="invalid adapter name") as raised:
        check_adapter_name(name)
    assert raised.value.param == "name"
    if name:
        with pytest.raises(ConfigError, match="lora: invalid adapter name"):
            AdapterConfig(lora=(f"{name}=path",))


@pytest.mark.parametrize("name", ["a", "org/adapter:v2", "Größe 2", "a" * MAX_NAME_CHARS])
def test_valid_names(name: str) -> None:
    check_adapter_name(name)
