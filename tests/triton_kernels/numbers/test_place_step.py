"""Tokens and tables of a recorded step, against the same by PyTorch."""

import torch

from headway_runtime.kernels.triton.place_step import place_step, place_step_by_torch

BLOCK_SIZE = 16


def test_rows_get_their_tokens_and_tables(device: torch.device, generator: torch.Generator) -> None:
    for contexts, room in (([1], 1), ([16, 17, 0, 5000], 400), ([3] * 9, 5), ([0, 0], 2)):
        num_rows = len(contexts)
        width = max(-(-context // BLOCK_SIZE) for context in contexts)
        # Rows of nobody come last; no table was sent for them.
        sent = torch.randint(
            0, 1 << 30, (num_rows * width,), dtype=torch.int32, device=device, generator=generator
        )
        sampled = torch.randint(-1, 1 << 20, (num_rows + 3,), device=device, generator=generator)
        sources = torch.randint(
            -1, num_rows + 3, (num_rows,), dtype=torch.int32, device=device, generator=generator
        )
        given = torch.randint(0, 1 << 20, (num_rows,), dtype=torch.int32, device=device, generator=generator)
        told = torch.tensor(contexts, dtype=torch.int32, device=device)
        results = []
        for place in (place_step, place_step_by_torch):
            token_ids = torch.full((num_rows,), -7, device=device)
            tables = torch.full((num_rows, room), -7, dtype=torch.int32, device=device)
            place(
                torch.tensor([width], dtype=torch.int32, device=device),
                sent,
                told,
                given,
                sources,
                sampled,
                token_ids,
                tables,
                BLOCK_SIZE,
            )
            results.append((token_ids, tables))
        (got_tokens, got_tables), (want_tokens, want_tables) = results

        assert torch.equal(got_tokens, want_tokens)
        assert torch.equal(got_tables, want_tables)
        assert (got_tokens >= 0).all()
        assert (want_tables != -7).sum() == sum(-(-context // BLOCK_SIZE) for context in contexts)
