import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.parallel.group import Share, SingleRank, share_of
from tests.helpers.weights import Imagined


def test_a_single_rank_holds_everything() -> None:
    assert share_of(SingleRank(), 7) == Share(0, 7, 7)
    assert share_of(SingleRank(), 7).is_all


@pytest.mark.parametrize(("whole", "unit", "size"), [(12, 1, 4), (12, 3, 2), (64, 8, 8)])
def test_shares_are_equal_and_cover_all(whole: int, unit: int, size: int) -> None:
    shares = [share_of(Imagined(rank, size), whole, unit=unit) for rank in range(size)]
    covered = [i for share in shares for i in range(share.start, share.start + share.width)]
    assert covered == list(range(whole))
    assert {share.width for share in shares} == {whole // size}


def test_neighbouring_ranks_share_a_repeated_unit() -> None:
    """Query heads need their KV head: ranks 0 and 1 the first, 2 and 3 the second."""
    starts = [share_of(Imagined(rank, 4), 16, unit=8, repeat=True).start for rank in range(4)]
    assert starts == [0, 0, 8, 8]


@pytest.mark.parametrize(("whole", "unit", "repeat"), [(10, 1, False), (12, 6, False), (12, 5, True), (12, 4, True)])
def test_uneven_shares_are_refused(whole: int, unit: int, repeat: bool) -> None:
    with pytest.raises(ConfigError, match=f"{whole} columns in units of {unit} cannot be split among 4"):
        share_of(Imagined(0, 4), whole, unit=unit, repeat=repeat)
