"""What a tensor of a checkpoint may be wrong in: each damage is refused, and the tensor named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.quantization.sound_checkpoints import DOWN, KINDS, compressed

from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.quantized_weights import holds_no_numbers
from headway_runtime.models.loader import CheckpointWeights
from headway_runtime.parallel.share import Range

Change = Callable[[dict[str, torch.Tensor]], None]


def without(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(f"{DOWN}.{name}")


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{DOWN}.{name}": make(tensors[f"{DOWN}.{name}"]).contiguous()})


def with_code(byte: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One code, the last, is this byte."""

    def change(codes: torch.Tensor) -> torch.Tensor:
        changed = codes.view(torch.uint8).clone()
        changed[-1, -1] = byte
        return changed.view(codes.dtype)

    return change


def half_a_group_elsewhere(order: torch.Tensor) -> torch.Tensor:
    order = order.clone()
    order[:16] = 5
    return order


# Kind of checkpoint, what is changed in it, and what the error says of it.
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "gptq without scales": ("gptq", without("scales"), f"'{DOWN}.scales' is in no file"),
    "gptq without zero points": ("gptq", without("qzeros"), f"'{DOWN}.qzeros' is in no file"),
    "gptq without weights": ("gptq", without("qweight"), f"'{DOWN}.qweight' is in no file"),
    "gptq of another dtype": ("gptq", put("qweight", torch.Tensor.long), "is torch.int64, want int32"),
    "gptq of another shape": (
        "gptq",
        put("qweight", lambda one: one[:4]),
        r"has shape (4, 128), config.json asks",
    ),
    "gptq with integer scales": ("gptq", put("scales", torch.Tensor.int), "is torch.int32, want float16"),
    "scales that are not numbers": (
        "gptq",
        put("scales", lambda one: one.fill_(float("nan"))),
        "holds numbers that are infinite or none",
    ),
    "gptq with zero points that AutoGPTQ overwrote": (
        "gptq zeros",
        put("qzeros", lambda one: one.fill_(0xFF654321 - (1 << 32))),
        "qzeros' holds zero points that AutoGPTQ overwrote where it stored 0 less 1",
    ),
    "gptq of one version that says it is another": (
        "gptq",
        put("qzeros", lambda one: one.fill_(0x88888888 - (1 << 32))),
        "holds zero points such as [9], though sym=true means 8; checkpoint_format may have to be 'gptq_v2'",
    ),
    "gptq of the other version that says it is one": (
        "gptq v2",
        put("qzeros", lambda one: one.fill_(0x77777777)),
        "holds zero points such as [7], though sym=true means 8; checkpoint_format may have to be 'gptq'",
    ),
    "float8 with a code that is no number": (
        "float8",
        put("weight", with_code(0x7F)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "float8 with a negative code that is no number": (
        "float8",
        put("weight", with_code(0xFF)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "float8 with a scale that is infinite": (
        "float8",
        put("weight_scale", lambda one: one.fill_(float("inf"))),
        "holds numbers that are infinite or none",
    ),
    "float8 blocks with a code that is no number": (
        "float8 blocks",
        put("weight", with_code(0x7F)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "float8 blocks with a negative code that is no number": (
        "float8 blocks",
        put("weight", with_code(0xFF)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "gptq with scales of 0": (
        "gptq",
        put("scales", torch.zeros_like),
        f"'{DOWN}.scales' holds scales that are 0 throughout",
    ),
    "awq with scales of 0": ("awq", put("scales", torch.zeros_like), "holds scales that are 0 throughout"),
    "packed with scales of 0": (
        "packed",
        put("weight_scale", torch.zeros_like),
        f"'{DOWN}.weight_scale' holds scales that are 0 throughout",
    ),
    "integers with scales of 0": (
        "integers",
        put("weight_scale", torch.zeros_like),
        "holds scales that are 0 throughout",
    ),
    "float8 with scales of 0": (
        "float8",
        put("weight_scale", torch.zeros_like),
        "holds scales that are 0 throughout",
    ),
    "float8 blocks with scales of 0": (
        "float8 blocks",
        put("weight_scale_inv", torch.zeros_like),
        f"'{DOWN}.weight_scale_inv' holds scales that are 0 throughout",
    ),
    "packed with scales that are not numbers": (
        "packed",
        put("weight_scale", lambda one: one.fill_(float("nan"))),
        "holds numbers that are infinite or none",
    ),
    "order though there is none": (
        "gptq",
        put("g_idx", lambda one: one.flip(0)),
        "puts inputs in an order of its own, though the configuration says otherwise; correct desc_act",
    ),
    "order with too few groups": (
        "gptq order",
        put("g_idx", lambda one: one % 4),
        "does not put 32 inputs in each of 8",
    ),
    "order with groups of unlike sizes": (
        "gptq order",
        put("g_idx", half_a_group_elsewhere),
        "does not put 32 inputs",
    ),
    "order with groups that there are not": ("gptq order", put("g_idx", lambda one: one + 1), "or above 7"),
    "order that is missing": ("gptq order", without("g_idx"), f"'{DOWN}.g_idx' is in no file"),
    "awq without zero points": ("awq", without("qzeros"), f"'{DOWN}.qzeros' is in no file"),
    "awq of another shape": ("awq", put("scales", lambda one: one[:2]), r"has shape (2, 128)"),
    "packed without scales": ("packed", without("weight_scale"), f"'{DOWN}.weight_scale' is in no file"),
    "packed of another shape": (
        "packed",
        put("weight_shape", lambda one: one + 1),
        "says [129, 257], config.json asks for [128, 256]",
    ),
    "integers without scales": ("integers", without("weight_scale"), f"'{DOWN}.weight_scale' is in no file"),
    "integers without sign": ("integers", put("weight", torch.Tensor.byte), "is torch.uint8, want int8"),
    "float8 without scales": ("float8", without("weight_scale"), f"'{DOWN}.weight_scale' is in no file"),
    "float8 of the other kind": (
        "float8",
        put("weight", lambda one: one.to(torch.float8_e5m2)),
        "is torch.float8_e5m2, want float8_e4m3fn",
    ),
    "float8 with scales of another shape": (
        "float8",
        put("weight_scale", lambda one: one[:7]),
        "has shape (7, 1), config.json asks for (128, 1) or",
    ),
    "static inputs without scale": ("static", without("input_scale"), f"'{DOWN}.input_scale' is in no file"),
    "static inputs with scale 0": (
        "static",
        put("input_scale", torch.zeros_like),
        "holds 0.0, which is not positive",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_named(
    damage: str, write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    kind, change, complaint = DAMAGES[damage]
    config, packer, arguments, options = KINDS[kind]
    written = write_checkpoint(config, packers[packer](*arguments, **options))
    change_tensors(written.folder, change)
    with pytest.raises(ModelLoadError) as caught:
        start_runner(written.folder)
    assert complaint in str(caught.value)
    assert DOWN in str(caught.value)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_codes_that_are_no_numbers_are_found_wherever_they_are(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_runtime.layers.quantized_weights.CHECKED_BYTES", 100)
    codes = torch.tensor([one for one in range(256) if one & 0x7F != 0x7F], dtype=torch.uint8).repeat(7, 1)
    assert not holds_no_numbers(codes.view(torch.float8_e4m3fn))
    for place in (0, len(codes) // 2, -1):
        changed = codes.clone()
        changed[place, place] = byte
        assert holds_no_numbers(changed.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("wanted", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_plain_weights_that_are_not_finite_are_named(
    value: float, wanted: str, write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    """Of weights where they are quantized at load; of norms in any case."""
    written = write_checkpoint(None, packers["plain"]())
    name = "model.layers.1.input_layernorm.weight" if wanted == "none" else f"{DOWN}.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    change_tensors(written.folder, change)
    with pytest.raises(ModelLoadError, match=f"'{name}' holds numbers that are infinite or none"):
        start_runner(written.folder, quantization=wanted)


def test_a_ranks_part_of_a_bias_that_is_not_finite_is_named(tmp_path: Path) -> None:
    bias = torch.zeros(8)
    bias[5] = float("inf")
    save_file({"bias": bias}, tmp_path / "model.safetensors")
    weights = CheckpointWeights(tmp_path, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="'bias' holds numbers that are infinite or none"):
        weights.take("bias", (8,), Range(4, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_ones_load(kind: str, write_checkpoint: Any, packers: Any, start_runner: Any) -> None:
    config, packer, arguments, options = KINDS[kind]
    start_runner(write_checkpoint(config, packers[packer](*arguments, **options)).folder)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "integers", "float8", "float8 blocks"])
def test_some_scales_may_be_zero(
    kind: str, write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    """Of weights that are all 0."""
    config, packer, arguments, options = KINDS[kind]
    written = write_checkpoint(config, packers[packer](*arguments, **options))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = (one for one in tensors if one.startswith(DOWN) and "scale" in one)
        tensors[name].view(-1)[0] = 0

    change_tensors(written.folder, change)
    start_runner(written.folder)


def test_more_than_four_bits_in_four_are_refused(
    write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    config = compressed(weights={"num_bits": 4})
    written = write_checkpoint(config, packers["integers"]("channel", bits=4))
    change_tensors(written.folder, put("weight", lambda one: one + 8))
    with pytest.raises(ModelLoadError, match=f"'{DOWN}.weight' holds numbers that need more than 4 bits"):
        start_runner(written.folder)
