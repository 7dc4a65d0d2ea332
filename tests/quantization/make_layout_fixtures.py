"""Makes the fixtures of layouts that no tool had to be installed for: a tiny Llama of random codes.

    python tests/quantization/make_layout_fixtures.py

Codes, scales and zero points are drawn, and packed number by number as AutoGPTQ's, llm-compressor's and
DeepSeek's files are published to lie. `products.json` beside each says what its weights are, times a vector
that tests know: found by taking the packed words apart again, bit by bit, with no code of the engine and none
of the packing. What is written here is the same every time, which a test holds. Tokens mean nothing.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "layout_fixtures"
Matrix = list[list[float]]
Tensors = dict[str, torch.Tensor]
WORD_BITS = 32
HEAD_DIM, INNER, VOCABULARY = 16, 32, 32
GROUP = 32
# Neither wide nor high enough for a whole number of them.
BLOCK = (40, 136)


def config(hidden: int, num_kv_heads: int, quantization: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "dtype": "float16",
        "quantization_config": quantization,
    }


def shapes(fields: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs."""
    hidden, keys = fields["hidden_size"], fields["num_key_value_heads"] * HEAD_DIM
    layer = "model.layers.0"
    return {
        f"{layer}.self_attn.q_proj": (hidden, hidden),
        f"{layer}.self_attn.k_proj": (keys, hidden),
        f"{layer}.self_attn.v_proj": (keys, hidden),
        f"{layer}.self_attn.o_proj": (hidden, hidden),
        f"{layer}.mlp.gate_proj": (INNER, hidden),
        f"{layer}.mlp.up_proj": (INNER, hidden),
        f"{layer}.mlp.down_proj": (hidden, INNER),
    }


# Packing.


def word(numbers: list[int], bits: int) -> int:
    """The first number lowest; as int32."""
    found = sum(number << (bits * place) for place, number in enumerate(numbers))
    return found - (1 << WORD_BITS) if found >> (WORD_BITS - 1) else found


def words(numbers: list[int], bits: int) -> list[int]:
    count = WORD_BITS // bits
    return [word(numbers[first : first + count], bits) for first in range(0, len(numbers), count)]


def float16_scale(chance: random.Random, bits: int, inputs: int) -> float:
    wanted = chance.uniform(0.2, 1.0) / (2 ** (bits - 1) * inputs**0.5)
    return float(torch.tensor(wanted, dtype=torch.float16))


def gptq(*, bits: int, is_symmetric: bool, has_order: bool) -> Callable[..., Tensors]:
    """As AutoGPTQ packs: codes along inputs, zero points less 1 along outputs, both into words of 32 bits."""

    def pack(chance: random.Random, outputs: int, inputs: int) -> Tensors:
        num_groups = inputs // GROUP
        groups_of = [index // GROUP for index in range(inputs)]
        if has_order:
            # The same for all projections of one input.
            random.Random(inputs).shuffle(groups_of)
        columns = [[chance.randrange(2**bits) for _ in range(inputs)] for _ in range(outputs)]
        middle = 2 ** (bits - 1)
        # None is 0, of which AutoGPTQ makes nonsense.
        zeros = [
            [middle if is_symmetric else chance.randrange(1, 2**bits) for _ in range(outputs)]
            for _ in range(num_groups)
        ]
        scales = [[float16_scale(chance, bits, inputs) for _ in range(outputs)] for _ in range(num_groups)]
        packed = torch.tensor([words(codes, bits) for codes in columns], dtype=torch.int32)
        return {
            "qweight": packed.t().contiguous(),
            "qzeros": torch.tensor(
                [words([zero - 1 for zero in row], bits) for row in zeros], dtype=torch.int32
            ),
            "scales": torch.tensor(scales, dtype=torch.float16),
            "g_idx": torch.tensor(groups_of, dtype=torch.int32),
        }

    return pack


def int4_channel(chance: random.Random, outputs: int, inputs: int) -> Tensors:
    """As llm-compressor packs: codes without sign along inputs, one scale for each output."""
    rows = [words([chance.randrange(16) for _ in range(inputs)], 4) for _ in range(outputs)]
    scales = [[float16_scale(chance, 4, inputs)] for _ in range(outputs)]
    return {
        "weight_packed": torch.tensor(rows, dtype=torch.int32),
        "weight_scale": torch.tensor(scales, dtype=torch.float16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def fp8_blocks(chance: random.Random, outputs: int, inputs: int) -> Tensors:
    """As DeepSeek's files: a code for each weight, a scale for each block; those at the ends are smaller."""
    codes = [
        [chance.randrange(0x7F) | chance.choice((0, 0x80)) for _ in range(inputs)] for _ in range(outputs)
    ]
    height, width = BLOCK
    scales = [
        [chance.uniform(0.2, 1.0) / (448 * inputs**0.5) for _ in range(-(-inputs // width))]
        for _ in range(-(-outputs // height))
    ]
    return {
        "weight": torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale_inv": torch.tensor(scales, dtype=torch.float32),
    }


# Taking apart: nothing above is used.


def number(rows: list[list[int]], row: int, column: int, bits: int) -> int:
    """The number at a column of a row of words, read from its bits."""
    per_word = WORD_BITS // bits
    found = rows[row][column // per_word] >> (bits * (column % per_word))
    return int(found & (2**bits - 1))


def meant_by_gptq(bits: int) -> Callable[[Tensors], Matrix]:
    def weight(tensors: Tensors) -> Matrix:
        codes, zeros = tensors["qweight"].t().tolist(), tensors["qzeros"].tolist()
        scales, groups_of = tensors["scales"].tolist(), tensors["g_idx"].tolist()
        return [
            [
                (number(codes, output, index, bits) - number(zeros, group, output, bits) - 1)
                * scales[group][output]
                for index, group in enumerate(groups_of)
            ]
            for output in range(len(codes))
        ]

    return weight


def meant_by_int4_channel(tensors: Tensors) -> Matrix:
    rows, scales = tensors["weight_packed"].tolist(), tensors["weight_scale"].tolist()
    outputs, inputs = tensors["weight_shape"].tolist()
    return [
        [(number(rows, output, index, 4) - 8) * scales[output][0] for index in range(inputs)]
        for output in range(outputs)
    ]


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent, 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (8 + mantissa) * 2.0 ** (exponent - 10))


def meant_by_fp8_blocks(tensors: Tensors) -> Matrix:
    codes, scales = tensors["weight"].view(torch.uint8).tolist(), tensors["weight_scale_inv"].tolist()
    return [
        [e4m3(code) * scales[output // BLOCK[0]][index // BLOCK[1]] for index, code in enumerate(row)]
        for output, row in enumerate(codes)
    ]


# Writing.


def autogptq(*, bits: int, is_symmetric: bool, has_order: bool) -> dict[str, Any]:
    """As AutoGPTQ's to_dict of BaseQuantizeConfig has it."""
    return {
        "bits": bits,
        "group_size": GROUP,
        "damp_percent": 0.01,
        "desc_act": has_order,
        "static_groups": False,
        "sym": is_symmetric,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": f"gptq_model-{bits}bit-{GROUP}g",
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
    }


INT4_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def write(
    folder: Path,
    fields: dict[str, Any],
    pack: Callable[..., Tensors],
    meaning: Callable[[Tensors], Matrix],
    file_name: str = "model.safetensors",
) -> None:
    folder.mkdir(parents=True)
    chance = random.Random(folder.name)
    tensors: Tensors = {}
    products = {}
    for module, (outputs, inputs) in shapes(fields).items():
        made = pack(chance, outputs, inputs)
        tensors |= {f"{module}.{name}": one for name, one in made.items()}
        vector = torch.linspace(-1, 1, inputs, dtype=torch.float64).tolist()
        products[module] = [
            round(sum(one * two for one, two in zip(row, vector, strict=True)), 5) for row in meaning(made)
        ]
    hidden = fields["hidden_size"]
    tensors["model.embed_tokens.weight"] = torch.tensor(
        [[chance.gauss(0, 1) for _ in range(hidden)] for _ in range(VOCABULARY)], dtype=torch.float16
    )
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = torch.ones(hidden, dtype=torch.float16)
    save_file(tensors, folder / file_name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    (folder / "products.json").write_text(json.dumps(products) + "\n")


def make(folder: Path) -> None:
    """All of them, into a folder that is not there."""
    own: dict[str, Any] = {"bits": 4, "is_symmetric": False, "has_order": True}
    write(
        folder / "autogptq-order-groups",
        config(64, 2, autogptq(**own)),
        gptq(**own),
        meant_by_gptq(4),
        f"gptq_model-4bit-{GROUP}g.safetensors",
    )
    own = {"bits": 8, "is_symmetric": True, "has_order": False}
    write(folder / "autogptq-8bit", config(64, 2, autogptq(**own)), gptq(**own), meant_by_gptq(8))
    write(folder / "int4-channel", config(64, 2, INT4_CHANNEL), int4_channel, meant_by_int4_channel)
    write(folder / "fp8-wide-blocks", config(144, 3, FP8_BLOCKS), fp8_blocks, meant_by_fp8_blocks)


if __name__ == "__main__":
    make(FOLDER)
