"""The KV cache's types in a whole engine: how many tokens a size holds, and that answers stay right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits
from headway_runtime.errors import ConfigError
from headway_runtime.layers.kv_numbers import from_codes, to_codes
from headway_runtime.memory import KV_BYTES, kept_as, kv_bytes_per_token
from headway_runtime.model_config import read_model_config

TINY = Path(__file__).parents[2] / "runtime/headway_runtime/bundled/headway-tiny"
NUMBERS_PER_TOKEN = 2 * 3 * 2  # keys and values, layers, heads
HEAD_DIM = 32


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "want"),
    [
        ("auto", HEAD_DIM * 4),
        ("bfloat16", HEAD_DIM * 2),
        ("fp8", HEAD_DIM + 4),
        ("fp8_e4m3", HEAD_DIM + 4),
        ("int8", HEAD_DIM + 4),
    ],
)
def test_a_size_holds_as_many_tokens_as_its_bytes_say(
    kv_cache_dtype: str, want: int, start_engine: Callable[..., Any]
) -> None:
    """Scales are counted, and what is counted is what is allocated, but for less than a block."""
    memory_bytes = 3_000_000
    driver = start_engine(kv_cache_memory_bytes=memory_bytes, kv_cache_dtype=kv_cache_dtype)
    bytes_per_block = 16 * NUMBERS_PER_TOKEN * want
    assert driver.engine.kv_blocks_total == memory_bytes // bytes_per_block - 1
    data = driver.engine._runner._cache.data
    assert memory_bytes - bytes_per_block < data.nbytes <= memory_bytes
    assert data.nbytes == (driver.engine.kv_blocks_total + 1) * bytes_per_block


def test_bytes_per_token_of_every_type() -> None:
    """headway-tiny has 4 layers of 2 KV heads of 64 numbers."""
    model = read_model_config(TINY)
    want = {"bfloat16": 2048, "float16": 2048, "float32": 4096, "fp8_e4m3": 1088, "int8": 1088}
    assert {name: kv_bytes_per_token(model, name) for name in KV_BYTES} == want
    assert kept_as("auto", "float16") == "float16"
    assert kept_as("fp8", "bfloat16") == kept_as("fp8_e4m3", "float32") == "fp8_e4m3"


def test_a_cache_too_small_is_refused_with_what_its_type_needs(start_engine: Callable[..., Any]) -> None:
    per_block = 16 * NUMBERS_PER_TOKEN * (HEAD_DIM + 4)
    with pytest.raises(ConfigError, match=f"raise --kv-cache-memory-bytes to at least {17 * per_block}"):
        start_engine(kv_cache_memory_bytes=17 * per_block - 1, kv_cache_dtype="int8")
    assert (
        start_engine(kv_cache_memory_bytes=17 * per_block, kv_cache_dtype="int8").engine.kv_blocks_total == 16
    )
    with pytest.raises(ConfigError, match="raise --kv-cache-memory-bytes"):
        start_engine(kv_cache_memory_bytes=17 * per_block)


def test_the_default_size_follows_the_type(start_engine: Callable[..., Any]) -> None:
    """What a full batch can fill is as many blocks whatever they hold, so the bytes shrink."""
    sizes = {}
    for kv_cache_dtype in ("auto", "int8"):
        driver = start_engine(
            kv_cache_memory_bytes=None,
            envelope=Envelope(4, 64),
            limits=Limits(4, 64),
            kv_cache_dtype=kv_cache_dtype,
        )
        assert driver.engine.kv_blocks_total == 64
        sizes[kv_cache_dtype] = driver.engine._runner._cache.data.nbytes
    assert sizes["auto"] * (HEAD_DIM + 4) == sizes["int8"] * HEAD_DIM * 4


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8", "int8"])
def test_answers_are_the_same_in_pieces_from_the_cache_and_after_preemption(
    kv_cache_dtype: str, way: str, start_engine: Callable[..., Any]
) -> None:
    """Within a type nothing shows how KV came to be: in float32 products add up nearly alike."""
    asked = prompts(40, 50, 60, 45)

    def answers(**changes: Any) -> tuple[list[list[int]], Any]:
        driver = start_engine(kv_cache_dtype=kv_cache_dtype, **changes)
        for number, prompt in enumerate(asked):
            driver.add(str(number), prompt, max_tokens=60)
        driver.run()
        return [driver.tokens(str(number)) for number in range(len(asked))], driver

    want, driver = answers()
    assert answers(envelope=Envelope(16, 29), limits=Limits(16, 29))[0] == want
    driver.add("again", asked[0], max_tokens=60)
    driver.run()
    assert driver.tokens("again") == want[0]
    assert driver.counter("cached_tokens") == 32
    per_block = 16 * kv_bytes_per_token(driver.engine._runner._model_config, driver.engine.kv_dtype)
    preempted, driver = answers(kv_cache_memory_bytes=17 * per_block)
    assert driver.counter("preemptions") > 0
    assert preempted == want


@pytest.mark.parametrize(("kv_cache_dtype", "least"), [("bfloat16", 20), ("int8", 12), ("fp8", 2)])
def test_greedy_answers_begin_as_those_of_a_full_cache(
    kv_cache_dtype: str, least: int, start_engine: Callable[..., Any]
) -> None:
    """Random weights are nearly undecided at every token, so answers part sooner than a trained model's.

    least: tokens that agree before the first that differs, on average over 16 prompts.
    """
    asked = prompts(*range(30, 190, 10))
    answers = {}
    for name in ("auto", kv_cache_dtype):
        driver = start_engine(kv_cache_dtype=name)
        for number, prompt in enumerate(asked):
            driver.add(str(number), prompt, max_tokens=32)
        driver.run()
        answers[name] = [driver.tokens(str(number)) for number in range(len(asked))]
    agreeing = [
        next((at for at, (one, other) in enumerate(zip(got, want, strict=True)) if one != other), 32)
        for got, want in zip(answers[kv_cache_dtype], answers["auto"], strict=True)
    ]
    assert sum(agreeing) / len(agreeing) >= least, agreeing


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_are_as_near_as_their_type_allows(dtype: torch.dtype) -> None:
    """Of any magnitude: the largest of a head is what counts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((50, 3, 96), generator=generator)
    x *= 10.0 ** torch.arange(-25, 25).view(-1, 1, 1)
    codes, scales = to_codes(x, dtype)
    error = (from_codes(codes, scales, torch.float32) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    steps = largest / 254 if dtype == torch.int8 else x.abs() / 16 + largest / 448 / 1024
    assert (error <= steps * 1.001).all()
    zeros = to_codes(torch.zeros((2, 8)), dtype)
    assert from_codes(*zeros, torch.float32).eq(0).all()
    assert codes.view(torch.int8).ne(-128).all()


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_kernels_make_the_same_codes_as_pytorch(kept: str, make_paged: Callable[..., Any]) -> None:
    """Values, which nothing rotates, to the last bit; in both kernels that store."""
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kept]
    paged = make_paged((2, 2, 64, 16), torch.bfloat16, dtype)
    if paged.cache.kernels is None:
        pytest.skip("this machine compiles no CPU kernels")
    table = paged.table(300)
    rows = paged.rows(200)
    # From numbers that are subnormal as codes to the largest.
    rows.qkv.mul_(torch.logspace(-6, 6, 200).unsqueeze(1).bfloat16())
    rows.qkv[11] = 0
    paged.chunk(rows, table, 0)
    value = rows.qkv.view(200, -1, 64)[:, -2:]
    codes, scales = to_codes(value, dtype)
    position = torch.arange(200)
    place = table[position // 16], slice(2, None), position % 16
    assert torch.equal(paged.kv.numbers.view(torch.uint8)[place], codes.view(torch.uint8))
    assert torch.equal(paged.kv.scales[place], scales)
    own = paged.rows(1)
    paged.decodes(own, [table], [200])
    codes, scales = to_codes(own.qkv.view(1, -1, 64)[0, -2:], dtype)
    assert torch.equal(paged.kv.numbers.view(torch.uint8)[table[12], 2:, 8], codes.view(torch.uint8))
    assert torch.equal(paged.kv.scales[table[12], 2:, 8], scales)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_block_moves_as_bytes(kept: torch.dtype, way: str, make_paged: Callable[..., Any]) -> None:
    """What `data` holds of blocks is all there is of them: copied to other places they read the same."""
    paged = make_paged((2, 2, 64, 16), torch.bfloat16, kept)
    table, elsewhere = paged.table(100), paged.table(100)
    rows = paged.rows(90)
    paged.chunk(rows, table, 0)
    paged.cache.data[:, elsewhere] = paged.cache.data[:, table].clone()
    paged.cache.clear(table)
    assert paged.kv.by_head(table, torch.float32).eq(0).all()
    rows = paged.rows(1)
    got = paged.decodes(rows, [elsewhere], [90])[0].float()
    assert (got - paged.want(rows, elsewhere, 90)).abs().max() < 0.02
    assert paged.kv.by_head(elsewhere, torch.float32)[:, :90].ne(0).any(-1).all()


def test_the_engine_says_what_it_keeps(start_engine: Callable[..., Any]) -> None:
    assert start_engine().engine.kv_dtype == "float32"
    assert start_engine(kv_cache_dtype="fp8").engine.kv_dtype == "fp8_e4m3"
