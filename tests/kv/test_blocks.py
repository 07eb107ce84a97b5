from roseinfer.kv.blocks import BlockPool


def never(block: int) -> bool:
    return False


def always(block: int) -> bool:
    return True


def test_blocks_are_reused_least_recently_used_first() -> None:
    reused: list[int] = []
    pool = BlockPool(4, reused.append)
    taken = pool.take(4)
    pool.release([taken[2]], always)
    pool.release([taken[0]], always)
    pool.release([taken[1]], never)  # nobody can want its content: reused before the others
    assert list(pool.walk_free()) == [taken[1], taken[2], taken[0]]
    reused.clear()
    assert pool.take(2) == (taken[1], taken[2])
    assert reused == [taken[1], taken[2]]


def test_spare_blocks_are_taken_when_no_other_is_free() -> None:
    pool = BlockPool(6, lambda block: None, spare_from=3)
    first = pool.take(2)
    pool.release(first, always)
    assert list(pool.walk_free()) == [2, 0, 1, 3, 4, 5], "behind what was never used, before what is spare"
    taken = pool.take(4)
    assert taken == (2, 0, 1, 3)
    pool.release([1, 3], always)
    assert list(pool.walk_free()) == [1, 3, 4, 5], "a block that was used is spare no longer"
    pool.release([2], never)
    assert pool.take(5) == (2, 1, 3, 4, 5)
    pool.release([5, 4], always)
    assert list(pool.walk_free()) == [5, 4], "with no spare block left, the tail is the end"


def test_more_spare_than_there_are() -> None:
    pool = BlockPool(2, lambda block: None, spare_from=5)
    pool.release(pool.take(1), always)
    assert list(pool.walk_free()) == [1, 0]


def test_a_free_block_can_be_shared_out_of_the_middle() -> None:
    pool = BlockPool(5, lambda block: None)
    taken = pool.take(5)
    pool.release(taken, always)
    pool.share(taken[2])
    assert list(pool.walk_free()) == [taken[0], taken[1], taken[3], taken[4]]
    assert pool.num_free == 4
    pool.share(taken[2])
    pool.release([taken[2]], always)
    assert taken[2] not in list(pool.walk_free()), "one owner is left"
    pool.release([taken[2]], always)
    assert list(pool.walk_free())[-1] == taken[2]
