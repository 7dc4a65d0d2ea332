"""How many sequences run at once where nothing says it, by the kind of device."""

from typing import Any

import pytest
import torch

from headway_operator.spec import batching
from headway_runtime import batch_options
from headway_runtime.config import Envelope, Limits
from headway_runtime.engine_config import resolve_engine_config
from headway_runtime.engine_options import keyword_options
from headway_runtime.errors import ConfigError

# What is said -> the highest number on a CPU, on a GPU, and at start if that is another one.
SAID = [
    ({}, 64, 256, None),
    ({"max_num_seqs": 100}, 100, 100, None),
    ({"max_num_batched_tokens": 128}, 64, 128, None),
    ({"max_num_batched_tokens": 32}, 32, 32, None),
    ({"initial_max_num_batched_tokens": 48}, 48, 48, None),
    ({"initial_max_num_seqs": 8}, 64, 256, 8),
    ({"initial_max_num_seqs": 100}, 100, 256, 100),
]


@pytest.mark.parametrize(("said", "on_cpu", "on_gpu", "initial"), SAID)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_more_sequences_run_at_once_on_a_gpu(
    *,
    said: dict[str, Any],
    on_cpu: int,
    on_gpu: int,
    initial: int | None,
    has_gpu: bool,
    checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = keyword_options(checkpoint().folder, said)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    found = resolve_engine_config(options)
    budget = said.get("max_num_batched_tokens", 2048)
    most = on_gpu if has_gpu else on_cpu
    assert found.envelope == Envelope(most, budget)
    assert found.limits == Limits(initial or most, said.get("initial_max_num_batched_tokens", budget))


def test_more_than_a_step_has_room_for_is_refused_by_name(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        keyword_options(checkpoint().folder, {"max_num_seqs": 64, "max_num_batched_tokens": 63})
    with pytest.raises(ConfigError, match="--initial-max-num-batched-tokens"):
        keyword_options(
            checkpoint().folder, {"initial_max_num_seqs": 64, "initial_max_num_batched_tokens": 63}
        )


def test_replicas_and_servers_have_the_same_defaults() -> None:
    names = ("GPU_NUM_SEQS", "CPU_NUM_SEQS")
    assert [getattr(batching, name) for name in names] == [getattr(batch_options, name) for name in names]
