"""A vocabulary's fingerprint: what it depends on, and what not."""

from roseinfer.predictor.vocabulary import fingerprint


def test_equal_vocabularies_have_equal_fingerprints() -> None:
    assert fingerprint({"a": 0, "é": 1}) == fingerprint({"é": 1, "a": 0})


def test_other_tokens_or_other_ids_have_others() -> None:
    others = [{"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1}]
    assert len({fingerprint(vocabulary) for vocabulary in others}) == len(others)
