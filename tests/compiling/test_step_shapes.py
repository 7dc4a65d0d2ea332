"""Whatever step comes later, the start has launched its kernels before."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from headway_runtime.compiling.imagined_steps import imagined_profile, launch_steps
from headway_runtime.compiling.noted_launches import NotedLaunch, noted_launches
from headway_runtime.compiling.step_shapes import StepLimits, step_shapes
from headway_runtime.config import EngineConfig, Envelope, Limits, SpeculativeConfig
from headway_runtime.kernels.triton.launch import Gpu
from headway_runtime.kernels.triton.paged_rows import least_prefilled_tokens
from headway_runtime.kernels.triton.row_products import ROW_CLASSES
from headway_runtime.parallel.share import Share

H200 = Gpu("nvidia_h200", 90, 132)
OLDER = Gpu("other", 80, 108)
NUM_RANDOM_STEPS = 12
Engine = Callable[..., EngineConfig]


def random_steps(limits: StepLimits, generator: random.Random) -> Iterator[tuple[int, ...]]:
    """Of one token a sequence, of few, of many, and mixed."""
    for _ in range(NUM_RANDOM_STEPS):
        count = generator.choice([1, 2, limits.sequences, generator.randint(1, limits.sequences)])
        left = generator.choice([limits.tokens, generator.randint(count, limits.tokens)])
        most = generator.choice([1, 8, limits.tokens, None])
        counts: list[int] = []
        for others in reversed(range(count)):
            own = generator.choice([1, 8, limits.tokens]) if most is None else most
            counts.append(generator.randint(1, min(own, limits.tokens_of_sequence, left - others)))
            left -= counts[-1]
        generator.shuffle(counts)
        yield tuple(counts)


def corners(limits: StepLimits) -> Iterator[tuple[int, ...]]:
    """Least and most rows of each class of rows and of each number of sequences."""
    for rows in (1, 7, 8, 9, *(rows + more for rows in (*ROW_CLASSES, 128, 384) for more in (0, 1))):
        if rows <= min(limits.tokens, limits.tokens_of_sequence):
            yield (rows,)
    for count in {1, 16, 17, 128, 129, limits.sequences}:
        for tokens in (1, 2, 8, 9, limits.tokens // count):
            if count <= limits.sequences and 0 < tokens * count <= limits.tokens:
                yield (min(tokens, limits.tokens_of_sequence),) * count


def key_of(launch: NotedLaunch) -> tuple[str, ...]:
    parts = (launch.constants, launch.signature, launch.attributes, launch.options)
    return (launch.name, *(str(sorted(part.items(), key=str)) for part in parts))


def told(launch: NotedLaunch) -> str:
    constants = {launch.kernel.arg_names[place[0]]: value for place, value in launch.constants.items()}
    return f"{launch.name} {constants}"


def started(config: EngineConfig, gpu: Gpu) -> dict[tuple[str, ...], str]:
    return {key_of(one): told(one) for one in noted_launches(gpu, lambda: launch_steps(config, Share()))}


def launched(config: EngineConfig, gpu: Gpu, steps: Sequence[Sequence[int]]) -> dict[tuple[str, ...], str]:
    def launch() -> None:
        profile = imagined_profile(config, Share())
        for counts in steps:
            profile.launch_shape(counts)

    return {key_of(one): told(one) for one in noted_launches(gpu, launch)}


@pytest.mark.parametrize(
    ("model", "gpu", "sequences", "tokens", "changes"),
    [
        pytest.param("dense", H200, 16, 512, {}, id="bfloat16"),
        pytest.param("dense", H200, 64, 256, {"kv_cache_dtype": "fp8"}, id="KV in fp8"),
        pytest.param("wide", H200, 256, 2048, {"quantization": "int4"}, id="int4"),
        pytest.param("wide", OLDER, 16, 1024, {"quantization": "int4"}, id="int4 elsewhere"),
        pytest.param("wide", H200, 64, 512, {"quantization": "fp8"}, id="fp8"),
        pytest.param("dense", OLDER, 64, 512, {"quantization": "fp8"}, id="fp8 elsewhere"),
        pytest.param("experts", H200, 64, 512, {}, id="experts"),
        pytest.param("experts", H200, 16, 1024, {"quantization": "int4"}, id="experts in int4"),
        pytest.param("windows", H200, 64, 256, {}, id="windows"),
        pytest.param("dense", H200, 16, 256, {"enforce_eager": True}, id="nothing recorded"),
    ],
)
def test_no_step_needs_a_kernel_that_the_start_did_not(
    model: str, gpu: Gpu, sequences: int, tokens: int, changes: dict[str, Any], engine_of: Engine
) -> None:
    config = engine_of(
        model,
        envelope=Envelope(sequences, tokens),
        limits=Limits(sequences, tokens),
        max_model_len=512,
        cuda_graph_sizes=None,
        **changes,
    )
    limits = StepLimits(sequences, tokens, config.max_model_len - 1)
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    steps = [*corners(limits), *random_steps(limits, random.Random(seed))]

    known = started(config, gpu)
    found = launched(config, gpu, steps)

    assert len(found) > 8
    assert [name for key, name in found.items() if key not in known] == []


def test_guesses_are_checked_by_kernels_of_the_start(engine_of: Engine) -> None:
    draft = engine_of("windows").model_path
    config = engine_of(
        envelope=Envelope(20, 256, 3),
        limits=Limits(20, 256, 3),
        speculative=SpeculativeConfig("draft_model", draft),
        cuda_graph_sizes=None,
    )
    own = engine_of("windows", envelope=Envelope(20, 256), limits=Limits(20, 256))
    steps = [(1,) * 20, (4,) * 20, (4, 1, 2), (2,) * 17, (1, 2), (255,)]

    known = started(config, H200)
    found = launched(config, H200, steps) | launched(own, H200, steps)

    assert [name for key, name in found.items() if key not in known] == []


@pytest.mark.parametrize(("num_groups", "want"), [(1, 9), (8, 9), (9, 8), (12, 6), (16, 5), (32, 3), (40, 2)])
def test_tokens_are_a_prefill_from_some_number_on(num_groups: int, want: int) -> None:
    assert least_prefilled_tokens(num_groups) == want


def test_shapes_keep_to_what_a_step_may_have() -> None:
    limits = StepLimits(20, 100, 40)

    shapes = step_shapes(limits, 16, [384, 64])

    assert all(len(counts) <= 20 and sum(counts) <= 100 and max(counts) <= 40 for counts in shapes)
    assert len(set(shapes)) == len(shapes)
    assert {(1,), (2,), (5,), (1,) * 17, (2,) * 17, (5,) * 17, (16,), (32,), (32, 32)} <= set(shapes)
