"""Which sizes of decode steps are recorded, when, and which one a step takes."""

import pytest

from headway_runtime.graphs.sizes import first_of, ladder, smallest_that_holds, within


def test_sizes_are_close_where_steps_are_small() -> None:
    assert ladder(1) == (1,)
    assert ladder(5) == (1, 2, 4, 5)
    assert ladder(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert ladder(64)[-1] == 64
    assert ladder(300)[-4:] == (256, 272, 288, 300)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 63, 64, 255, 256, 500, 512])
def test_every_step_has_a_size_that_wastes_little(max_num_seqs: int) -> None:
    sizes = ladder(max_num_seqs)

    assert list(sizes) == sorted(set(sizes))
    for num_rows in range(1, max_num_seqs + 1):
        size = smallest_that_holds(sizes, num_rows)
        assert size is not None
        assert num_rows <= size <= max(num_rows + 16, 2 * num_rows - 1 if num_rows < 8 else 0)


def test_no_step_of_very_many_sequences_is_recorded() -> None:
    assert ladder(4000)[-1] == 512
    assert smallest_that_holds(ladder(4000), 513) is None


def test_the_largest_is_first_and_the_smallest_among_the_first() -> None:
    assert first_of(ladder(256)) == (256, 64, 16, 4, 1)
    assert first_of(ladder(3)) == (3, 1)
    assert first_of((8, 16)) == (16, 8)
    assert first_of((1,)) == (1,)
    assert first_of(()) == ()


def test_sizes_that_are_told_are_kept_to_what_can_run() -> None:
    assert within((8, 2, 2), 64) == (2, 8)
    assert within((8, 100, 200), 64) == (8, 64)
    assert within((64,), 64) == (64,)
    assert within((), 64) == ()
