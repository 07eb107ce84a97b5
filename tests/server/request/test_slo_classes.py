"""The operator's file of classes: what it says, and what is said of a wrong one."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.server.formats.objectives import default_class
from roseinfer.server.request.slo_classes import SloClasses, configured_classes, parse_slo_classes

KEY = "sk-very-secret"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
GOOD = f"""
[classes.chat]
ttft_ms = 500
tpot_ms = 50.5
priority = -2

[classes."batch.night"]
e2e_ms = 60000
timeout_s = 90

[models]
tiny = "chat"

[keys]
"sha256:{DIGEST.upper()}" = "batch.night"

[service_tiers]
flex = "batch.night"
"""


def configured(tmp_path: Path, text: str, **options: Any) -> SloClasses:
    file = tmp_path / "classes.toml"
    file.write_text(text)
    return configured_classes(
        ServerConfig(slo_classes=str(file), api_key=(KEY, "other"), **options),
        options.get("served_model_name", ("tiny",)),
    )


def test_what_a_file_says(tmp_path: Path) -> None:
    classes = configured(tmp_path, GOOD)
    chat, batch = classes.classes["chat"], classes.classes["batch.night"]
    assert chat.slo == Slo(ttft_s=0.5, tpot_s=0.0505, class_name="chat")
    assert (chat.priority, chat.timeout_s) == (-2, None)
    assert batch.slo == Slo(e2e_s=60.0, class_name="batch.night") and batch.timeout_s == 90.0
    assert classes.service_tiers == {"flex": "batch.night"}
    assert default_class(classes, "tiny", DIGEST) == "batch.night", "the key's goes before the model's"
    assert default_class(classes, "tiny", None) == default_class(classes, "tiny", "0" * 64) == "chat"
    assert default_class(classes, "another", None) == "none"


def test_without_the_option_there_are_none() -> None:
    assert configured_classes(ServerConfig(), ["tiny"]) == SloClasses()
    assert default_class(SloClasses(), "tiny", None) == "none"


def test_workers_are_told_of_it(tmp_path: Path) -> None:
    classes = configured(tmp_path, GOOD)
    assert msgspec.json.decode(msgspec.json.encode(classes), type=SloClasses) == classes


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({}, "classes"), ({"classes": {}}, "classes"), ({"classes": 3}, "classes"), ({"clases": {"a": {}}}, "clases"),
        ({"classes": {"a": 3}}, "classes.a"), ({"classes": {"a": {"ttft": 3}}}, "classes.a.ttft"),
        ({"classes": {"a": {"ttft_ms": 0}}}, "classes.a.ttft_ms"),
        ({"classes": {"a": {"ttft_ms": -1}}}, "classes.a.ttft_ms"),
        ({"classes": {"a": {"tpot_ms": "3"}}}, "classes.a.tpot_ms"),
        ({"classes": {"a": {"tpot_ms": True}}}, "classes.a.tpot_ms"),
        ({"classes": {"a": {"e2e_ms": float("nan")}}}, "classes.a.e2e_ms"),
        ({"classes": {"a": {"e2e_ms": float("inf")}}}, "classes.a.e2e_ms"),
        ({"classes": {"a": {"e2e_ms": 10**400}}}, "classes.a.e2e_ms"),
        ({"classes": {"a": {"timeout_s": 0}}}, "classes.a.timeout_s"),
        ({"classes": {"a": {"priority": 1.5}}}, "classes.a.priority"),
        ({"classes": {"a": {"priority": True}}}, "classes.a.priority"),
        ({"classes": {"a": {"priority": 2**63}}}, "classes.a.priority"),
        ({"classes": {"a": {"allow_hints": 0}}}, "classes.a.allow_hints"),
        ({"classes": {"a": {"allow_tenant": "no"}}}, "classes.a.allow_tenant"),
        ({"classes": {"none": {}}}, "classes.none"), ({"classes": {"custom": {}}}, "classes.custom"),
        ({"classes": {"a b": {}}}, "classes.a b"), ({"classes": {"": {}}}, "classes."),
        ({"classes": {"a": {}}, "models": {"m": "b"}}, "models.m"),
        ({"classes": {"a": {}}, "models": {"m": 3}}, "models.m"),
        ({"classes": {"a": {}}, "models": ["a"]}, "models"),
        ({"classes": {"a": {}}, "service_tiers": {"flex": "b"}}, "service_tiers.flex"),
        ({"classes": {"a": {}}, "keys": {f"sha256:{DIGEST}": "b"}}, f"keys.sha256:{DIGEST[:8]}"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_an_error_that_names_the_place(data: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError, match=r"^slo_classes: ") as raised:
        parse_slo_classes(data)
    assert str(raised.value).startswith(f"slo_classes: {place}")


@pytest.mark.parametrize("key", [KEY, DIGEST, f"sha256:{KEY}", "sha256:", f"sha256:{DIGEST}0"])
def test_keys_are_written_as_digests_and_never_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"slo_classes: keys\..*sha256sum") as raised:
        parse_slo_classes({"classes": {"a": {}}, "keys": {key: "a"}})
    assert KEY not in str(raised.value) and DIGEST not in str(raised.value)


def test_what_the_server_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.tiny: unknown model"):
        configured(tmp_path, GOOD, served_model_name=("rose",))
    with pytest.raises(ConfigError, match=r"keys\.sha256:00000000.*: unknown API key"):
        configured(tmp_path, GOOD.replace(DIGEST.upper(), "0" * 64))


@pytest.mark.parametrize("data", [b"classes = [", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "classes.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="is invalid TOML"):
        configured_classes(ServerConfig(slo_classes=str(file)), ["tiny"])
    with pytest.raises(ConfigError, match="cannot read"):
        configured_classes(ServerConfig(slo_classes=str(tmp_path)), ["tiny"])
