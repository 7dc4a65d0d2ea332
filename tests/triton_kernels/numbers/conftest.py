"""Tests of the kernels' numbers: interpreted, or on a GPU where there is one.

Triton decides when it is imported whether it interprets, so these run in processes of their own:
`TRITON_INTERPRET=1 pytest tests/triton_kernels/numbers`. In others they are not collected; there
`test_interpreted.py` runs them.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


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
