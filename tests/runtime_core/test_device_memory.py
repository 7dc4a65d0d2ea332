"""What of a GPU's memory the KV cache gets, by what was measured; and the steps that are measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway_runtime.config import EngineConfig, Envelope, SpeculativeConfig
from headway_runtime.errors import ConfigError
from headway_runtime.memory import (
    DeviceMemory,
    least_cache_bytes,
    num_kv_blocks,
    staged_blocks,
    staging_bytes,
    usable_cache_bytes,
)
from headway_runtime.model_config import read_model_config
from headway_runtime.model_loading import load_model, make_cache, make_inputs
from headway_runtime.profile_step import StepProfile, decode_batch, draft_profile, largest_batch
from headway_runtime.quantization.choice import Quantization
from headway_runtime.speculator import load_draft

GIB = 1 << 30
# An H200 with an 8B model in bfloat16.
MEMORY = DeviceMemory(
    total=140 * GIB, free=120 * GIB, weights=16 * GIB, step=3 * GIB, graphs=GIB // 2, adapters=0
)
ASKED: dict[str, Any] = {
    "usable": 64 * GIB,
    "least": GIB,
    "max_num_batched_tokens": 8192,
    "max_model_len": 32768,
}


def test_the_cache_gets_what_steps_and_recordings_leave() -> None:
    want = 120 * GIB - 3 * GIB - GIB // 2 - int(0.02 * 140 * GIB)

    assert MEMORY.cache_bytes(None, **ASKED | {"usable": 10**15}) == want
    for name in ("adapters", "staging"):
        found = replace(MEMORY, **{name: GIB}).cache_bytes(None, **ASKED | {"usable": 10**15})
        assert found == want - GIB, name


def test_what_blocks_pass_through_on_their_way_is_told_where_there_is_any() -> None:
    tight = replace(MEMORY, free=5 * GIB, staging=GIB // 4)

    with pytest.raises(ConfigError, match=r"adapters - 0\.25 GiB KV offload on its way - 2\.80 GiB spare"):
        tight.cache_bytes(None, **ASKED)


@pytest.mark.parametrize(
    ("block_bytes", "want"),
    [(2 << 20, 64), (5 << 20, 25), (1 << 30, 1), (4096, 128)],
    ids=["8B", "70B", "larger than a half should be", "small"],
)
def test_halves_that_blocks_pass_through_are_bounded(block_bytes: int, want: int) -> None:
    assert staged_blocks(block_bytes) == want
    assert staging_bytes(block_bytes) == 2 * want * block_bytes


def test_the_cache_gets_no_more_than_sequences_can_fill_or_the_user_wants() -> None:
    assert MEMORY.cache_bytes(None, **ASKED) == 64 * GIB
    assert MEMORY.cache_bytes(5 * GIB, **ASKED) == 5 * GIB


def test_what_does_not_fit_is_told_with_all_of_the_arithmetic() -> None:
    tight = replace(MEMORY, total=24 * GIB, free=5 * GIB, adapters=GIB)

    with pytest.raises(ConfigError) as caught:
        tight.cache_bytes(None, **ASKED)

    assert str(caught.value) == (
        "the KV cache does not fit: it needs 1.00 GiB for one sequence of max_model_len=32768, and has "
        "0.02 GiB = 24.00 GiB of this GPU - 16.00 GiB weights - 3.00 GiB taken by others and the driver - "
        "3.00 GiB the largest step, as measured - 0.50 GiB recorded decode steps - 1.00 GiB LoRA adapters - "
        "0.48 GiB spare (2%); lower --max-model-len, --max-num-batched-tokens (now 8192), --max-num-seqs, "
        "--cuda-graph-sizes, --max-cpu-loras, or take a quantization of fewer bits"
    )


def test_more_than_there_is_room_for_is_refused_with_the_flag_that_asks_for_it() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 119\.00 GiB for kv_cache_memory_bytes=.*lower --kv-cache-me"
    ):
        MEMORY.cache_bytes(119 * GIB, **ASKED)


def test_least_and_usable_bytes_count_whole_blocks() -> None:
    least = least_cache_bytes(bytes_per_token=100, max_model_len=33, block_size=16)
    usable = usable_cache_bytes(bytes_per_token=100, max_num_seqs=3, max_model_len=33, block_size=16)

    sizes = {"bytes_per_token": 100, "max_model_len": 33, "block_size": 16}
    assert num_kv_blocks(kv_cache_memory_bytes=least, **sizes) == 3
    assert num_kv_blocks(kv_cache_memory_bytes=usable, **sizes) == 9


@pytest.mark.parametrize(
    ("envelope", "want"),
    [
        (Envelope(4, 64), [16] * 4),
        (Envelope(3, 64), [21, 21, 22]),
        (Envelope(64, 64), [1] * 64),
        (Envelope(3, 4), [1, 1, 2]),
        # No sequence is longer than the model takes.
        (Envelope(1, 1000), [255]),
    ],
)
def test_the_largest_step_has_all_sequences_and_tokens(
    envelope: Envelope, want: list[int], engine_config: Callable[..., EngineConfig]
) -> None:
    batch = largest_batch(engine_config(envelope=envelope))

    assert [chunk.num_tokens for chunk in batch.chunks] == want
    assert batch.num_tokens == sum(want)
    assert batch.num_decodes == want.count(1)
    assert all(chunk.samples for chunk in batch.chunks)


class Meter:
    """Says how many rows went through the model."""

    def __init__(self) -> None:
        self.rows = 0

    def peak_bytes(self, work: Callable[[], None]) -> int:
        self.rows = 0
        work()
        return self.rows


@pytest.mark.parametrize(("num_guesses", "want_samples"), [(0, 5), (3, 20)])
def test_the_steps_that_are_measured_run(
    num_guesses: int,
    want_samples: int,
    checkpoint: Callable[..., Any],
    engine_config: Callable[..., EngineConfig],
) -> None:
    folder, cpu = checkpoint().folder, torch.device("cpu")
    config = engine_config(envelope=Envelope(5, 48, num_guesses))
    model_config = read_model_config(folder)
    with torch.inference_mode():
        model = load_model(folder, model_config, config, Quantization("none"), torch.float32, cpu)
        cache = make_cache(model, model_config, config, 1, torch.float32, cpu)
        inputs = make_inputs(model, config, cache, torch.float32, cpu)
    meter, samples = Meter(), []

    class Counting:
        """The model, which says what it was asked for."""

        ran_as_one = False
        linears, attention_layers = model.linears, model.attention_layers

        def forward(self, token_ids: Any, *rest: Any) -> Any:
            meter.rows += len(token_ids)
            return model.forward(token_ids, *rest)

        def logits(self, hidden: Any) -> Any:
            samples.append(len(hidden))
            return model.logits(hidden)

    profile = StepProfile(
        Counting(),
        cache,
        inputs,
        config,
        model_config.vocab_size,
        cpu,
        samples=True,
    )
    found = profile.measure(3, meter)

    assert (found.prompts, found.decodes) == (48, 3)
    assert samples == [want_samples, 3]
    assert len(decode_batch(3, config).chunks) == 3


@pytest.mark.parametrize("more_tokens", [-3, 0, 5])
def test_the_model_that_guesses_is_measured_too(
    more_tokens: int, checkpoint: Callable[..., Any], engine_config: Callable[..., EngineConfig]
) -> None:
    """Its largest step is of what it lacks, and runs before the other model's."""
    folder, cpu = checkpoint().folder, torch.device("cpu")
    config = engine_config(
        envelope=Envelope(5, 48, 3), speculative=SpeculativeConfig("draft_model", str(folder))
    )
    draft = load_draft(config, torch.float32, cpu)
    assert draft is not None
    vocab_size = draft.model_config.vocab_size + more_tokens
    order = []

    class Told:
        ran_as_one = False

        def __init__(self, name: str, model: Any) -> None:
            self._name, self._model = name, model
            self.linears, self.attention_layers = model.linears, model.attention_layers

        def forward(self, token_ids: Any, *rest: Any) -> Any:
            order.append((self._name, len(token_ids)))
            return self._model.forward(token_ids, *rest)

        def logits(self, hidden: Any) -> Any:
            return self._model.logits(hidden)

    model, model_config = draft.model, draft.model_config
    draft.model = Told("guesses", model)
    with torch.inference_mode():
        guessing = draft_profile(draft, config, vocab_size, torch.float32, cpu)
        cache = make_cache(model, model_config, config, 1, torch.float32, cpu)
        inputs = make_inputs(model, config, cache, torch.float32, cpu)
    profile = StepProfile(
        Told("checks", model), cache, inputs, config, model_config.vocab_size, cpu, samples=True
    )

    profile.measure(2, Meter(), guessing)

    assert order == [("guesses", 48), ("checks", 48), ("checks", 2)]
