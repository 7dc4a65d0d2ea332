"""The block pool: references, the free list's order, and an integrity check that really finds faults."""

import random

import pytest

from headway_runtime.blocks import NULL_BLOCK, BlockPool


def give_back(pool: BlockPool, table: list[int]) -> None:
    """As a sequence does: the last block first, because the head of it is what another one may want."""
    pool.release(table[::-1], [True] * len(table))


def test_wanted_blocks_are_taken_again_when_they_were_free_longest() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    assert table == [1, 2, 3]
    give_back(pool, table)
    assert pool.allocate(4) == [4, 3, 2, 1]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_blocks_that_nobody_wants_are_taken_again_before_all_others() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    assert pool.release([1, 3], [True, False]) == [True, True]
    assert pool.allocate(3) == [3, 4, 1]


def test_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    first = pool.allocate(2)
    pool.share(first[0])
    second = [first[0]]
    pool.check_integrity([first, second])
    assert pool.num_in_use([1, 2]) == 2
    assert pool.release(first, [True, True]) == [False, True]
    assert pool.num_in_use([1, 2]) == 1
    assert pool.num_free == 1
    pool.check_integrity([second])
    assert pool.num_references(first[0]) == 1
    give_back(pool, second)
    assert pool.num_free == 2
    pool.check_integrity([])


def test_free_block_can_be_taken_again_from_the_middle_of_the_list() -> None:
    pool = BlockPool(4)
    pool.share(2)
    pool.check_integrity([[2]])
    assert pool.allocate(3) == [1, 3, 4]
    pool.check_integrity([[2], [1, 3, 4]])


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert NULL_BLOCK not in pool.allocate(3)
    with pytest.raises(AssertionError):
        pool.share(NULL_BLOCK)


def test_allocating_more_than_is_free_fails() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.allocate(3)


def test_releasing_twice_fails() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    give_back(pool, table)
    with pytest.raises(AssertionError, match="more often"):
        give_back(pool, table)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        pytest.param([[1, 2]], "block 3: 1 references, 0 holders", id="leaked"),
        pytest.param([[1, 2, 3], [3]], "block 3: 1 references, 2 holders", id="shared without a reference"),
        pytest.param([[1, 2, 3, 3]], "twice", id="twice in one table"),
        pytest.param([[1, 2, 3, 4]], "block 4: 0 references, 1 holders", id="used while free"),
        pytest.param([[0, 1, 2, 3]], "null block", id="null block in a table"),
    ],
)
def test_integrity_check_finds_wrong_tables(tables: list[list[int]], complaint: str) -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity(tables)


def test_integrity_check_finds_a_broken_list() -> None:
    pool = BlockPool(5)
    pool._next[2] = 4
    with pytest.raises(AssertionError, match="does not lead back"):
        pool.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_use_keeps_integrity(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(20)
    tables: list[list[int]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.45 and pool.num_free > 0:
            tables.append(pool.allocate(rng.randint(1, pool.num_free)))
        elif action < 0.6 and tables:
            shared = rng.choice(tables)[: rng.randint(1, 3)]
            for block in shared:
                assert not pool.share(block)
            tables.append(list(shared))
        elif tables:
            give_back(pool, tables.pop(rng.randrange(len(tables))))
        pool.check_integrity(tables)
        assert pool.num_used == len({block for table in tables for block in table})
