"""What attention's kernels keep on a GPU is what they are predicted to."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway_runtime.fit.gpu_kinds import LEAST_CAPABILITY
from headway_runtime.fit.gpu_workspace import decode_workspace_bytes
from headway_runtime.kernels.triton import paged_decode
from headway_runtime.kernels.triton.attention_tiles import HeadShape
from headway_runtime.kernels.triton.launch import Gpu
from headway_runtime.kernels.triton.paged_rows import MOST_DECODED_TOKENS, SEQUENCE_CAPACITIES
from headway_runtime.layers import kernel_choice
from headway_runtime.model_config import read_model_config


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim"),
    [
        pytest.param(32, 8, 128, id="llama 8b"),
        pytest.param(32, 32, 64, id="no groups"),
        pytest.param(28, 4, 128, id="seven heads to one"),
        pytest.param(8, 1, 256, id="one KV head"),
        pytest.param(128, 1, 80, id="more heads to one than rows"),
        pytest.param(4, 2, 16, id="small heads"),
    ],
)
def test_the_workspace_of_decodes_is_what_is_predicted(
    query_heads: int, kv_heads: int, head_dim: int, fixture_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "gpu_of", lambda _: Gpu("a", 90, 132))
    shape = HeadShape(kv_heads, query_heads // kv_heads, head_dim, 16)
    made = paged_decode.make_workspace(
        shape, MOST_DECODED_TOKENS, SEQUENCE_CAPACITIES[-1], torch.device("meta")
    )
    model = replace(
        read_model_config(fixture_folder("llama-3.1-8b")),
        num_attention_heads=query_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
    assert decode_workspace_bytes(model, 132) == sum(
        one.nbytes for one in (made.softmax, made.sums, made.arrivals)
    )
    assert decode_workspace_bytes(model, 0) == 0


def test_a_plan_knows_which_gpus_run_the_kernels() -> None:
    major, minor = kernel_choice.LEAST_CAPABILITY
    assert 10 * major + minor == LEAST_CAPABILITY
