"""Keys of adapters, as promises hold them."""

from roseinfer.core.adapters import adapter_key, adapter_keys


def test_keys_are_integers_of_64_bits() -> None:
    assert adapter_key("00000000000000ff" + "a" * 48) == 255
    assert adapter_key("f" * 64) == -1
    assert adapter_key("8" + "0" * 63) == -(2**63)


def test_keys_fill_a_fixed_length() -> None:
    digests = ["0" * 15 + "1" + "0" * 48, "0" * 15 + "2" + "0" * 48]
    assert adapter_keys(digests, 4) == (1, 2, 0, 0)
    assert adapter_keys(digests, 1) == (1,)
    assert adapter_keys([], 2) == (0, 0)
