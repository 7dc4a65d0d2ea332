"""Tests of the kernels' numbers: interpreted, or on a GPU where there is one.

Triton decides when it is imported whether it interprets, so these run in processes of their own:
`TRITON_INTERPRET=1 pytest tests/triton_kernels/numbers`. In others they are not collected; there
`test_interpreted.py` runs them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from benchmarks.gpu.fast_interpreter import hasten
from torch import Tensor

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.paged_rows import PagedRows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    hasten()

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def memory_is_checked() -> Iterator[None]:
    """Interpreted kernels reach what they were given and nothing beside it."""
    if not INTERPRETED:
        yield
        return
    from tests.triton_kernels.numbers.memory_checks import checked_memory

    with checked_memory():
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def generator(request: pytest.FixtureRequest, device: torch.device) -> torch.Generator:
    """Fresh random numbers, whose seed is told by a test that fails."""
    seed = int.from_bytes(os.urandom(4), "big")
    request.node.user_properties.append(("seed", seed))
    print(f"seed {seed}")
    return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Sequences in a paged cache, their blocks in random order; all that is nobody's is NaN.

    query: rows as projections have them, with keys and values behind the queries. out: NaN.
    """

    query: Tensor
    numbers: Tensor
    scales: Tensor | None
    which: "PagedRows"
    out: Tensor


@pytest.fixture
def make_paged_case(device: torch.device, generator: torch.Generator) -> Callable[..., PagedCase]:
    def make(
        lengths: Sequence[tuple[int, int]],
        *,
        num_kv_heads: int,
        num_groups: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kept: torch.dtype | None = None,
        num_free_rows: int = 0,
    ) -> PagedCase:
        """lengths: of each sequence's rows and whole context. num_free_rows: behind the last sequence's."""
        from headway_runtime.kernels.triton.paged_rows import PagedRows
        from headway_runtime.layers.kv_numbers import LARGEST_CODES, to_codes

        kept = dtype if kept is None else kept
        num_rows = sum(rows for rows, _ in lengths) + num_free_rows
        width = (num_groups + 2) * num_kv_heads * head_dim
        query = torch.randn(num_rows, width, device=device, generator=generator).to(dtype)
        counts = [-(-context // block_size) for _, context in lengths]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks - 1, device=device, generator=generator) + 1
        wide = torch.randn(
            num_blocks, 2 * num_kv_heads, block_size, head_dim, device=device, generator=generator
        )
        # Heads and tokens of unlike size, as models have them.
        wide *= (
            torch.rand(num_blocks, 2 * num_kv_heads, block_size, 1, device=device, generator=generator) * 3
        )
        scales = None
        if kept in LARGEST_CODES:
            numbers, scales = to_codes(wide, kept)
        else:
            numbers = wide.to(kept)
        tables = order[-1].repeat(len(lengths), max(counts, default=0) + 1).int()
        is_owned = torch.zeros(num_blocks, block_size, dtype=torch.bool, device=device)
        taken = 0
        for sequence, ((_, context), count) in enumerate(zip(lengths, counts, strict=True)):
            own = order[taken : taken + count]
            tables[sequence, :count] = own
            owned = is_owned[own].flatten()
            owned[:context] = True
            is_owned[own] = owned.view(count, block_size)
            taken += count
        nobody = ~is_owned[:, None, :].expand(-1, 2 * num_kv_heads, -1)
        if kept != torch.int8:
            bytes_or_numbers = numbers.view(torch.uint8) if scales is not None else numbers
            bytes_or_numbers[nobody] = 0x7F if scales is not None else torch.nan
        if scales is not None:
            scales[nobody] = torch.nan
        ends = torch.tensor([rows for rows, _ in lengths], device=device).cumsum(0).int()
        starts = torch.cat((torch.zeros(1, dtype=torch.int32, device=device), ends))
        contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device)
        longest = max((rows for rows, _ in lengths), default=1)
        which = PagedRows(starts.int(), contexts, tables, num_rows, longest)
        out_size = num_groups * num_kv_heads * head_dim
        out = torch.full((num_rows, out_size), torch.nan, dtype=dtype, device=device)
        return PagedCase(query, numbers, scales, which, out)

    return make
