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
