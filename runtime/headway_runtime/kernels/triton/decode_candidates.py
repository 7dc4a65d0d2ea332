"""What `benchmarks/gpu/tune.py` tries for attention of few tokens, by class of shapes (paged_decode.py)."""

from headway_runtime.kernels.triton.launch import DEFAULT

# Of the longest pair, unless fewer than half of the programs had any work then: to put more together takes
# longer than some more tiles.
MOST_PARTS = 16


def _candidates(*launches: tuple[int, int, int, int]) -> dict[str, list[dict[str, int]]]:
    """launches: keys, warps, stages and programs per multiprocessor."""
    values = [
        {
            "keys": keys,
            "programs_per_multiprocessor": programs,
            "least_tiles": least_tiles,
            "most_parts": MOST_PARTS,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }
        for keys, num_warps, num_stages, programs in launches
        for least_tiles in (1, 2, 4)
    ]
    return {DEFAULT: values}


CANDIDATES = _candidates(
    (32, 2, 7, 4),
    (32, 4, 5, 4),
    (32, 4, 7, 4),
    (64, 4, 3, 3),
    (64, 4, 5, 2),
    (64, 4, 5, 3),
    (64, 4, 7, 2),
    (64, 8, 5, 2),
    (128, 8, 3, 1),
    (128, 8, 5, 1),
)
WIDE_CANDIDATES = _candidates(
    (32, 4, 5, 2),
    (32, 8, 5, 1),
    (64, 4, 3, 2),
    (64, 4, 5, 2),
    (64, 8, 3, 1),
    (64, 8, 5, 1),
    (64, 8, 5, 2),
    (128, 8, 3, 1),
)
