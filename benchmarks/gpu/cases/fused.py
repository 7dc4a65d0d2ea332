"""What is done to rows between products: norms, rotation and the store into the cache, gates."""

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from benchmarks.gpu import costs
from benchmarks.gpu.cases.attention import BLOCK_SIZE, behind, heads_of, layer_kv
from benchmarks.gpu.cases.case import Case, Result, Work, as_it_is, normal
from benchmarks.gpu.costs import KVName, ModelShape
from torch import Generator, Tensor

from headway_runtime.kernels.triton.gate import ActivateAndMultiply, gate_by_torch
from headway_runtime.kernels.triton.launch import DEFAULT
from headway_runtime.kernels.triton.norm import Norm, norm_by_torch
from headway_runtime.kernels.triton.rotate_and_store import RotateAndStore, rotate_and_store_by_torch
from headway_runtime.kernels.triton.row_codes import RowCodes
from headway_runtime.layers.kv_numbers import LayerKV
from headway_runtime.layers.rotary import RotaryTable, rotate_
from headway_runtime.model_config import Activation
from headway_runtime.model_config_rope import Rope

EPSILON = 1e-5
NUM_POSITIONS = 8192
# Of rows as codes: a number at the edge between two codes may fall to either side.
CODES_TOLERANCE = {torch.int8: 3e-3, torch.float8_e4m3fn: 5e-3}


def norm_case(
    name: str,
    rows: int,
    size: int,
    *,
    adds: bool = True,
    norms_delta: bool = False,
    codes: torch.dtype | None = None,
) -> Case:
    """adds: a delta to the rows first. norms_delta: as Gemma does. codes: what comes of it."""

    def make(generator: Generator) -> Work:
        x, weight = normal(generator, rows, size), normal(generator, size)
        delta = normal(generator, rows, size) if adds else None
        own = normal(generator, size, dtype=torch.float32) if norms_delta else None
        launcher = Norm(size, EPSILON)

        def run() -> Tensor | tuple[Tensor, Tensor] | RowCodes:
            if codes is not None:
                return launcher.codes(x, delta, own, weight, codes)
            if delta is None:
                return launcher.norm(x, weight)
            if own is None:
                return launcher.add_and_norm(x, delta, weight), x
            return launcher.norm_add_and_norm(x, delta, own, weight), x

        def exact() -> Result:
            sums = x.clone()
            found = norm_by_torch(sums, delta, own, weight, EPSILON, codes)
            if isinstance(found, RowCodes):
                return _numbers(found)
            return found if delta is None else (found, sums)

        def by_torch() -> Callable[[], object]:
            return lambda: functional.rms_norm(
                x if delta is None else x.add_(delta), (size,), weight, EPSILON
            )

        is_usual = codes is None and not norms_delta
        return Work(
            run, exact, as_it_is if codes is None else _numbers, {"torch": by_torch} if is_usual else {}
        )

    cost = costs.norm(rows, size, adds=adds, code_bytes=None if codes is None else 1)
    tolerance = 6e-3 if codes is None else CODES_TOLERANCE[codes]
    return Case(name, "norm", str(1 << (size - 1).bit_length()), make, cost, tolerance)


def rotate_case(
    name: str, model: ModelShape, rows: int, kv: KVName = "bfloat16", *, skipped: int = 0
) -> Case:
    """Rows of one step, in blocks in random order. skipped: blocks in front of these, that nobody uses."""
    heads = heads_of(model)
    num_heads = model.num_heads + 2 * model.num_kv_heads
    num_blocks = -(-rows // BLOCK_SIZE) + 1

    def make(generator: Generator) -> Work:
        device = generator.device
        qkv = normal(generator, rows, num_heads * model.head_dim)
        whole = layer_kv(heads, skipped + num_blocks, kv, torch.bfloat16, device)
        cache = behind(whole, skipped)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator, device=device)[:rows]
        positions = torch.randint(0, NUM_POSITIONS, (rows,), generator=generator, device=device)
        table = RotaryTable(Rope(500000.0, None), model.head_dim, NUM_POSITIONS, torch.bfloat16, device)
        rotation = table.at(positions)
        norms = None
        if model.normalizes_heads:
            norms = (1 + normal(generator, 2, model.head_dim, dtype=torch.float32) / 8, EPSILON)
        launcher = RotateAndStore(model.num_heads, model.num_kv_heads, model.head_dim, BLOCK_SIZE)
        query_size = model.num_heads * model.head_dim

        late = slots + skipped * BLOCK_SIZE

        def run() -> None:
            launcher(qkv, rotation, late, whole.numbers, whole.scales, norms)

        def exact() -> Result:
            own, kept = qkv.clone(), LayerKV(cache.numbers.clone(), _clone(cache.scales))
            rotate_and_store_by_torch(own, rotation, slots, kept.numbers, kept.scales, norms)
            return own[:, :query_size], _stored(kept)

        def by_torch() -> Callable[[], object]:
            split = model.num_heads + model.num_kv_heads
            place = (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
            rows_of_heads = qkv.view(rows, num_heads, model.head_dim)

            def rotate_then_store() -> None:
                turned = rows_of_heads[:, :split]
                if norms is not None:
                    turned.copy_(functional.rms_norm(turned, (model.head_dim,), None, EPSILON))
                rotate_(turned, *rotation)
                cache.store(place, rows_of_heads[:, model.num_heads :])

            return rotate_then_store

        return Work(run, exact, lambda _: (qkv[:, :query_size], _stored(cache)), {"torch": by_torch})

    cost = costs.rotate_and_store(model, rows, kv)
    return Case(name, "rotate_and_store", DEFAULT, make, cost, tolerance=1e-2 if kv == "bfloat16" else 4e-2)


def gate_case(
    name: str,
    rows: int,
    size: int,
    activation: Activation = "silu",
    *,
    codes: torch.dtype | None = None,
) -> Case:
    """size: of the middle."""

    def make(generator: Generator) -> Work:
        gate_up = normal(generator, rows, 2 * size)
        launcher = ActivateAndMultiply(activation, size)

        def run() -> Tensor | RowCodes:
            return launcher(gate_up) if codes is None else launcher.codes(gate_up, codes)

        def exact() -> Result:
            found = gate_by_torch(gate_up, activation, codes)
            return _numbers(found) if isinstance(found, RowCodes) else found

        def by_torch() -> Callable[[], object]:
            gate, up = gate_up.chunk(2, -1)
            return lambda: functional.silu(gate).mul_(up)

        if codes is not None:
            return Work(run, exact, _numbers)
        return Work(run, exact, peers={"torch": by_torch})

    cost = costs.gate(rows, size, code_bytes=None if codes is None else 1)
    if codes is None:
        return Case(name, "gate", DEFAULT, make, cost, tolerance=6e-3)
    shape_class = str(1 << (size - 1).bit_length())
    return Case(name, "gate_codes", shape_class, make, cost, CODES_TOLERANCE[codes])


def _numbers(rows: RowCodes) -> Tensor:
    """What codes stand for, float32."""
    return rows.codes.float() * rows.scales[:, None]


def _stored(cache: LayerKV) -> Tensor:
    numbers = cache.numbers.float()
    return numbers if cache.scales is None else numbers * cache.scales.unsqueeze(-1)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
