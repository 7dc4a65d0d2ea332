"""Checkpoints of random codes, packed by NumPy as the tools' layouts are published, and what they stand for.

Shares no code with the engine: what weights are is computed here from codes, scales and zero points alone.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.request import SamplingParams
from headway_runtime.runner import Runner

Floats = NDArray[np.float32]
Tensors = dict[str, torch.Tensor]
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Packed:
    """One module's tensors, and the weight [outputs, inputs] that they stand for."""

    tensors: Tensors
    weight: Floats


Pack = Callable[[np.random.Generator, int, int], Packed]


@dataclass
class Written:
    """A checkpoint, and the weights of its linear layers."""

    folder: Path
    weights: dict[str, Floats] = field(default_factory=dict)


def words(numbers: NDArray[Any], bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers [rows, columns] without sign, packed along columns into int32."""
    count = 32 // bits
    padded = np.zeros((len(numbers), -(-numbers.shape[1] // count) * count), dtype=np.uint64)
    padded[:, : numbers.shape[1]] = numbers
    parts = padded.reshape(len(numbers), -1, count)[:, :, list(places or range(count))]
    packed = (parts << (np.arange(count, dtype=np.uint64) * np.uint64(bits))).sum(-1, dtype=np.uint64)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def random_groups(
    generator: np.random.Generator, outputs: int, inputs: int, bits: int, group_size: int, *, has_zeros: bool
) -> tuple[NDArray[Any], Floats, NDArray[Any]]:
    """Codes [outputs, inputs], scales and zero points [outputs, groups]; scales are exact in float16."""
    groups = inputs // (inputs if group_size == -1 else group_size)
    codes = generator.integers(0, 2**bits, (outputs, inputs))
    scales = generator.uniform(0.2, 1.0, (outputs, groups)) / (2 ** (bits - 1) * np.sqrt(inputs))
    zeros = np.full((outputs, groups), 2 ** (bits - 1))
    if has_zeros:
        zeros = generator.integers(0, 2**bits, (outputs, groups))
    return codes, scales.astype(np.float16).astype(np.float32), zeros


def meaning(codes: NDArray[Any], scales: Floats, zeros: NDArray[Any], groups_of: NDArray[Any]) -> Floats:
    weight: Floats = ((codes - zeros[:, groups_of]) * scales[:, groups_of]).astype(np.float32)
    return weight


def awq(group_size: int, *, has_zeros: bool = True, keeps_zeros: bool = True) -> Pack:
    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> Packed:
        codes, scales, zeros = random_groups(generator, outputs, inputs, 4, group_size, has_zeros=has_zeros)
        tensors = {
            "qweight": words(codes.T, 4, AWQ_PLACES),
            "scales": torch.from_numpy(scales.T.astype(np.float16).copy()),
        }
        if keeps_zeros:
            tensors["qzeros"] = words(zeros.T, 4, AWQ_PLACES)
        groups_of = np.arange(inputs) // (inputs // scales.shape[1])
        return Packed(tensors, meaning(codes, scales, zeros, groups_of))

    return pack


def gptq(
    group_size: int,
    *,
    bits: int = 4,
    has_zeros: bool = False,
    has_order: bool = False,
    is_old: bool = True,
    least_zero: int = 0,
) -> Pack:
    """least_zero: of zero points."""

    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> Packed:
        codes, scales, zeros = random_groups(
            generator, outputs, inputs, bits, group_size, has_zeros=has_zeros
        )
        zeros = zeros.clip(least_zero)
        groups_of = np.arange(inputs) // (inputs // scales.shape[1])
        if has_order:
            # The same for all that read the same input, as the tools find it.
            groups_of = np.random.default_rng(inputs).permutation(groups_of)
        packed_zeros = words(zeros.T, bits).numpy().view(np.uint32)
        if is_old:  # one less, as whole words, so that a zero borrows from the next
            packed_zeros = packed_zeros - np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        tensors = {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": torch.from_numpy(packed_zeros.view(np.int32).copy()),
            "scales": torch.from_numpy(scales.T.astype(np.float16).copy()),
            "g_idx": torch.from_numpy(groups_of.astype(np.int32)),
        }
        return Packed(tensors, meaning(codes, scales, zeros, groups_of))

    return pack


def packed(group_size: int, *, bits: int = 4, has_zeros: bool = False, has_order: bool = False) -> Pack:
    """llm-compressor's pack-quantized."""

    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> Packed:
        codes, scales, zeros = random_groups(
            generator, outputs, inputs, bits, group_size, has_zeros=has_zeros
        )
        groups_of = np.arange(inputs) // (inputs // scales.shape[1])
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if has_zeros:
            tensors["weight_zero_point"] = words(zeros.T, bits).t().contiguous()
        if has_order:
            groups_of = np.random.default_rng(inputs).permutation(groups_of)
            tensors["weight_g_idx"] = torch.from_numpy(groups_of.astype(np.int32))
        return Packed(tensors, meaning(codes, scales, zeros, groups_of))

    return pack


def integers(
    strategy: str, *, bits: int = 8, group_size: int = 32, has_zeros: bool = False, inputs_scale: float = 0.0
) -> Pack:
    """llm-compressor's int-quantized and naive-quantized. inputs_scale: of static 8-bit inputs; 0: none."""

    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> Packed:
        size = group_size if strategy == "group" else -1
        codes, scales, zeros = random_groups(generator, outputs, inputs, bits, size, has_zeros=has_zeros)
        if strategy == "tensor":
            scales = np.broadcast_to(scales[:1], scales.shape)
            zeros = np.broadcast_to(zeros[:1], zeros.shape)
        middle = 2 ** (bits - 1)
        kept = slice(0, 1) if strategy == "tensor" else slice(None)
        tensors = {
            "weight": torch.from_numpy((codes - middle).astype(np.int8)),
            "weight_scale": torch.from_numpy(scales[kept].copy()),
        }
        if has_zeros:
            tensors["weight_zero_point"] = torch.from_numpy((zeros[kept] - middle).astype(np.int8))
        if inputs_scale:
            tensors["input_scale"] = torch.tensor([inputs_scale])
        groups_of = np.arange(inputs) // (inputs // scales.shape[1])
        return Packed(tensors, meaning(codes, scales, zeros, groups_of))

    return pack


def float8_values() -> Floats:
    """What each of the 256 codes of e4m3fn stands for."""
    codes = np.arange(256)
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    normal = np.exp2(exponent - 7.0) * (1 + mantissa / 8)
    values = np.where(exponent == 0, np.exp2(-6.0) * mantissa / 8, normal) * np.where(sign == 1, -1, 1)
    values[(codes & 127) == 127] = np.nan
    rounded: Floats = values.astype(np.float32)
    return rounded


def float8(
    strategy: str,
    *,
    scale_name: str = "weight_scale",
    block: tuple[int, int] = (128, 128),
    has_input: bool = False,
) -> Pack:
    def pack(generator: np.random.Generator, outputs: int, inputs: int) -> Packed:
        codes = (
            generator.integers(0, 127, (outputs, inputs)) | generator.integers(0, 2, (outputs, inputs)) << 7
        )
        shape: tuple[int, ...] = {
            "tensor": (),
            "channel": (outputs, 1),
            "group": (outputs, inputs // 32),
        }.get(strategy, (-(-outputs // block[0]), -(-inputs // block[1])))
        scales = (generator.uniform(0.2, 1.0, shape) / (448 * np.sqrt(inputs))).astype(np.float32)
        rows, columns = {"group": (1, 32), "block": block}.get(strategy, (1, inputs))
        each = np.broadcast_to(scales, (outputs, 1)) if strategy in ("tensor", "channel") else scales
        each = np.repeat(np.repeat(each, rows, 0)[:outputs], columns, 1)[:, :inputs]
        tensors = {
            "weight": torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn),
            scale_name: torch.from_numpy(np.array(scales)),
        }
        if has_input:
            tensors["input_scale"] = torch.tensor(0.5)
        return Packed(tensors, (float8_values()[codes] * each).astype(np.float32))

    return pack


def plain(generator: np.random.Generator, outputs: int, inputs: int) -> Packed:
    weight = (generator.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
    return Packed({"weight": torch.from_numpy(weight)}, weight)


PACKERS: dict[str, Callable[..., Pack]] = {
    "awq": awq,
    "gptq": gptq,
    "packed": packed,
    "integers": integers,
    "float8": float8,
    "plain": lambda: plain,
}


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        shapes |= {f"{attention}.q_proj": (query, hidden), f"{attention}.o_proj": (hidden, query)}
        shapes |= dict.fromkeys((f"{attention}.k_proj", f"{attention}.v_proj"), (keys, hidden))
        shapes |= dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, hidden))
        shapes[f"{mlp}.down_proj"] = (hidden, inner)
    return shapes


@pytest.fixture(scope="session")
def packers() -> dict[str, Callable[..., Pack]]:
    return dict(PACKERS)


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Written]:
    """write_checkpoint(quantization, pack, others, **config): `others` packs modules whose names end so."""

    def write(
        quantization: dict[str, Any] | None, pack: Pack, others: dict[str, Pack] | None = None, **changes: Any
    ) -> Written:
        config = CONFIG | changes
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if quantization is not None:
            config = config | {"quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config))
        generator = np.random.default_rng(11)
        hidden = config["hidden_size"]
        tensors: Tensors = {"model.norm.weight": torch.ones(hidden)}
        tensors["model.embed_tokens.weight"] = torch.from_numpy(
            generator.standard_normal((config["vocab_size"], hidden)).astype(np.float32)
        )
        for index in range(config["num_hidden_layers"]):
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{index}.{name}.weight"] = torch.ones(hidden)
        written = Written(folder)
        shapes = linear_shapes(config)
        if not config["tie_word_embeddings"]:
            shapes["lm_head"] = (config["vocab_size"], hidden)
        for module, shape in shapes.items():
            endings = {"lm_head": plain} | (others or {})
            own = next((one for ending, one in endings.items() if module.endswith(ending)), pack)
            made = own(generator, *shape)
            written.weights[module] = made.weight
            tensors |= {f"{module}.{name}": one for name, one in made.tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        return written

    return write


@pytest.fixture
def change_tensors() -> Callable[[Path, Callable[[Tensors], None]], None]:
    """change_tensors(folder, change): `change` gets all tensors of its one file."""

    def apply(folder: Path, change: Callable[[Tensors], None]) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


@pytest.fixture(scope="session")
def start_runner() -> Callable[..., Runner]:
    """start_runner(folder, **changes of the config)."""

    def start(folder: Path, **changes: Any) -> Runner:
        config = EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=128,
            block_size=16,
            kv_cache_memory_bytes=16 * 2**20,
            envelope=Envelope(4, 128),
            limits=Limits(4, 128),
            max_waiting=1,
            num_threads=1,
        )
        return Runner(replace(config, **changes))

    return start


@pytest.fixture(scope="session")
def logits_of() -> Callable[[Runner, list[int]], torch.Tensor]:
    """logits_of(runner, token_ids): float32 [tokens, vocab], after each token of one prompt."""

    def compute(runner: Runner, token_ids: list[int]) -> torch.Tensor:
        from array import array

        table = array("q", range(1, 2 + len(token_ids) // 16))
        chunk = Chunk("a", token_ids, 0, len(token_ids), table, 0, True, SamplingParams())
        inputs = runner._inputs.build(Batch((chunk,), len(token_ids), 1))
        with torch.inference_mode():
            model: Any = runner._model
            hidden = model.forward(inputs.token_ids, inputs.positions, runner._cache, inputs.attention)
            logits: torch.Tensor = model.logits(hidden[: len(token_ids)])
        return logits.float()

    return compute


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Written, list[int]], torch.Tensor]:
    """reference_logits(written, token_ids): transformers' in float32 with the weights that were meant."""

    def compute(written: Written, token_ids: list[int]) -> torch.Tensor:
        config = json.loads((written.folder / "config.json").read_bytes())
        config.pop("quantization_config", None)
        tensors = load_file(written.folder / "model.safetensors")
        model: Any = LlamaForCausalLM(LlamaConfig(**config))
        model = model.float().eval()
        state = dict(model.state_dict())
        for name in state:
            module = name.removesuffix(".weight")
            if module in written.weights:
                state[name] = torch.from_numpy(written.weights[module])
            else:
                source = "model.embed_tokens.weight" if name == "lm_head.weight" else name
                state[name] = tensors[source].float()
        model.load_state_dict(state)
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return logits

    return compute
