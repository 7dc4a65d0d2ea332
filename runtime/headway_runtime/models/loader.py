"""Weights by name: read from safetensors files, or made up from a seed. No other format is ever opened.

A model takes each tensor it needs with the shape it expects; `finish` then tells of tensors nobody took. So
a checkpoint that does not fit its config is an error naming the tensor, never a model that talks nonsense.
Weights of linear layers come as they are to be kept: quantized where the checkpoint has them so, or where the
user wants it.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.checkpoint_files import checkpoint_files, indexed_tensors
from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.quantized_weights import QuantizedWeight
from headway_runtime.layers.quantizer import quantized, quantized_as
from headway_runtime.layers.weight_cuts import ALL, Part, cut, cut_plain, filled_rows
from headway_runtime.load_progress import LoadProgress
from headway_runtime.models.stored_weights import FLOATS, NOT_FINITE, WEIGHT_NAMES, read_stored
from headway_runtime.parallel.share import Range
from headway_runtime.quantization.choice import Online, Quantization
from headway_runtime.quantization.scheme import Scheme
from headway_runtime.start_timeline import StartTimeline
from headway_runtime.weight_stream.opening import open_tensor_files

# What may be there and is not needed: buffers of old checkpoints, which follow from config.json, and scales
# for a KV cache, which finds its own.
DERIVED_TENSORS = re.compile(
    r"(language_model\.model|model\.language_model|model)\.layers\.\d+\.self_attn\."
    r"(rotary_emb\.inv_freq|(.*\.)?[qkv]_(scale|zero_point)|prob_scale|[kv]_proj\.output_scale)"
)
# What quantizers leave at layers that have none; zeros then say nothing.
LEFT_OVER = (".bias", ".weight_zero_point", ".input_zero_point")
# As safetensors names them.
PLAIN_DTYPES = ("BF16", "F16", "F32")
UNQUANTIZED = Quantization("none")
# As transformers initialises a Llama.
DUMMY_STANDARD_DEVIATION = 0.02


class Weights(Protocol):
    """Where a model gets its tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's arithmetic, and of all tensors that are not quantized."""

    @property
    def compresses(self) -> bool:
        """Whether plain weights may be kept in fewer bits without loss (see `make_linear`)."""

    @property
    def adapters(self) -> AdapterBank | None:
        """What products are put into to which LoRA adapters can be added; None if there are to be none."""

    def names(self) -> Set[str]:
        """Of the tensors that are there and not yet taken; none where they are made up as they are taken."""

    def take(self, name: str, shape: tuple[int, ...], rows: Range | None = None) -> Tensor:
        """The tensor of that name, on the device and in the dtype of the model.

        rows: only these of `shape`, filled up with zeros where they reach past the end.
        """

    def take_linear(
        self, module: str, outputs: int, inputs: int, part: Part = ALL
    ) -> Tensor | QuantizedWeight:
        """The weight [outputs, inputs] of the linear layer of that name, or that part, as it is to be kept.

        Codes of a part are those of the whole weight.
        """

    def take_plain(self, module: str, outputs: int, inputs: int) -> Tensor:
        """The weight [outputs, inputs] of that linear layer in plain numbers, whatever it is stored in."""

    def put(self, name: str, tensor: Tensor) -> None:
        """A tensor that is a part of one taken, for whoever takes it under this name."""

    def finish(self, unused: Iterable[str] = ()) -> None:
        """All is taken. `unused`: names that may be there although nobody takes them."""

    def tell(self, timeline: StartTimeline) -> None:
        """Where the time went since the timeline was told last: the model is made."""


class CheckpointWeights:
    """The safetensors files of one folder, a single one or shards with an index."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = UNQUANTIZED,
        adapters: AdapterBank | None = None,
        *,
        compresses: bool = False,
    ) -> None:
        self.dtype, self.compresses = dtype, compresses
        self.adapters = adapters
        self._quantization = quantization
        self._folder = folder
        self._put: dict[str, Tensor] = {}
        paths = checkpoint_files(folder)
        self._progress = LoadProgress(sum(path.stat().st_size for path in paths), len(paths))
        self._indexed = indexed_tensors(folder)
        self._files = open_tensor_files(paths, device, self._indexed)
        self._all = dict(self._files.places)
        # Those that nobody has taken, and how many there are of each file.
        self._where = dict(self._all)
        self._left = Counter(self._all.values())

    def names(self) -> Set[str]:
        return self._where.keys() | self._put.keys() if self._put else self._where.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        self._put[name] = tensor

    def take(self, name: str, shape: tuple[int, ...], rows: Range | None = None) -> Tensor:
        return self._take_part(name, shape, Part(rows=rows))

    def take_linear(
        self, module: str, outputs: int, inputs: int, part: Part = ALL
    ) -> Tensor | QuantizedWeight:
        kind, name = self._quantization.of_module(module), f"{module}.weight"
        try:
            if isinstance(kind, Scheme) and not self._is_plain(module, kind):
                return cut(read_stored(self, module, outputs, inputs, kind), part)
            if kind is None or isinstance(kind, Scheme):
                return self._take_part(name, (outputs, inputs), part)
            if part.columns is None:
                return self._quantized(name, self._take_part(name, (outputs, inputs), part), kind)
            # A scale may be of all inputs.
            return cut(self._quantized(name, self.take(name, (outputs, inputs)), kind), part)
        except ValueError as error:
            raise self.error(name, str(error)) from error

    def take_plain(self, module: str, outputs: int, inputs: int) -> Tensor:
        scheme = self._quantization.of_module(module)
        if not isinstance(scheme, Scheme) or self._is_plain(module, scheme):
            return self.take(f"{module}.weight", (outputs, inputs))
        return read_stored(self, module, outputs, inputs, scheme).dequantized(self.dtype)

    def _quantized(self, name: str, weight: Tensor, kind: Online) -> QuantizedWeight:
        """A weight that is not finite has scales that are not."""
        found = quantized(weight, kind)
        if not bool(torch.isfinite(found.scales).all()):
            raise self.error(name, NOT_FINITE)
        return found

    def _take_part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        if name in self._put:
            return cut_plain(self._put.pop(name), part)
        if part == ALL or name not in self._where:
            tensor = self.take_stored(name, FLOATS, shape)
            self._check_vector(name, tensor)
            return tensor.to(self.dtype)
        files, rows = self._files, part.rows
        if files.shape_of(name) != shape or files.dtype_of(name) not in PLAIN_DTYPES:
            self.take_stored(name, FLOATS, shape)  # says what is wrong
        # There may be no more rows than that.
        own_rows = None if rows is None else Range(min(rows.first, shape[0]), min(rows.last, shape[0]))
        own = files.read(name, Part(own_rows, part.columns))
        self._taken(name, math.prod(shape) * own.dtype.itemsize)
        self._check_vector(name, own)
        own = own.to(self.dtype)
        return own.contiguous() if rows is None else filled_rows(own, Range(0, len(rows)))

    def _check_vector(self, name: str, tensor: Tensor) -> None:
        """Norms and biases. A second look at whole weights would cost a quarter of what loading them does."""
        if tensor.dim() == 1 and not bool(torch.isfinite(tensor).all()):
            raise self.error(name, NOT_FINITE)

    def _is_plain(self, module: str, scheme: Scheme) -> bool:
        """Whether plain numbers lie where a scheme is said to apply: tools do not name all exceptions."""
        if scheme.layout != "plain":
            return self.holds(f"{module}.weight") and not self.holds(
                f"{module}.{WEIGHT_NAMES[scheme.layout]}"
            )
        name = f"{module}.weight"
        if name not in self._where:
            return name in self._put
        return self._files.dtype_of(name) in PLAIN_DTYPES

    def holds(self, name: str) -> bool:
        """Whether a tensor of that name is there and not yet taken."""
        return name in self._where or name in self._put

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """A tensor as it lies there, of one of these dtypes and shapes."""
        if name not in self._where:
            raise self._missing(name)
        tensor = self._files.read(name)
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(map(repr, shapes))
            raise self.error(
                name,
                f"has shape {tuple(tensor.shape)!r}, config.json asks for {wanted}; "
                "copy the checkpoint again, or correct config.json",
            )
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            is_plain = self._quantization.stored is None
            says = "has no quantization_config for that" if is_plain else "has another quantization_config"
            raise self.error(
                name, f"is {tensor.dtype}, want {wanted}: config.json {says}; copy the checkpoint again"
            )
        self._taken(name, tensor.nbytes)
        return tensor

    def _taken(self, name: str, num_bytes: int) -> None:
        path = self._where.pop(name)
        self._progress.tensor_read(num_bytes)
        self._left[path] -= 1
        if not self._left[path]:
            self._progress.file_read()

    def _missing(self, name: str) -> ModelLoadError:
        shard = self._indexed.get(name)
        if shard is not None:
            return ModelLoadError(
                f"{shard}: has no tensor {name!r}, which the index puts there; copy the checkpoint again"
            )
        return ModelLoadError(
            f"{self._folder}: tensor {name!r} is in no file of the checkpoint; config.json, or its "
            "quantization_config, does not fit it: copy or quantize the checkpoint anew"
        )

    def error(self, name: str, complaint: str) -> ModelLoadError:
        """About the tensor of that name, which may be taken already."""
        path = self._all.get(name)
        place = "the checkpoint" if path is None else str(path)
        return ModelLoadError(f"{place}: tensor {name!r} {complaint}")

    def finish(self, unused: Iterable[str] = ()) -> None:
        left = sorted(
            name
            for name in self._where.keys() - set(unused)
            if not DERIVED_TENSORS.fullmatch(name) and not self._is_left_over(name)
        )
        self._progress.close()
        self._files.close()
        if left:
            raise ModelLoadError(
                f"{self._all[left[0]]}: {len(left)} tensors of the checkpoint have no place in this model, "
                f"first {left[0]!r}; config.json does not fit it"
            )

    def _is_left_over(self, name: str) -> bool:
        """Quantizers give layers a bias or zero points of zeros."""
        if self._quantization.stored is None or not name.endswith(LEFT_OVER):
            return False
        # Those of FP8 weights are FP8, which has no `any`.
        return not bool(self._files.read(name).float().any())

    def tell(self, timeline: StartTimeline) -> None:
        self._files.tell(timeline)


class DummyWeights:
    """Random weights that depend on the seed and each tensor's name only; norms are ones."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = UNQUANTIZED,
        adapters: AdapterBank | None = None,
        *,
        compresses: bool = False,
    ) -> None:
        self._seed = seed
        self.dtype, self.compresses = dtype, compresses
        self.adapters = adapters
        self._device = device
        self._quantization = quantization

    def take(self, name: str, shape: tuple[int, ...], rows: Range | None = None) -> Tensor:
        # All of it, so that ranks have the parts of one weight.
        return cut_plain(self._whole(name, shape), Part(rows=rows))

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        tensor = torch.empty(shape, dtype=self.dtype, device=self._device)
        return tensor.normal_(0.0, DUMMY_STANDARD_DEVIATION, generator=generator)

    def take_linear(
        self, module: str, outputs: int, inputs: int, part: Part = ALL
    ) -> Tensor | QuantizedWeight:
        weight = self._whole(f"{module}.weight", (outputs, inputs))
        kind = self._quantization.of_module(module)
        if kind is None:
            return cut_plain(weight, part)
        whole = quantized_as(weight, kind) if isinstance(kind, Scheme) else quantized(weight, kind)
        try:
            return cut(whole, part)
        except ValueError as error:
            raise ModelLoadError(f"tensor {module + '.weight'!r} {error}") from error

    def take_plain(self, module: str, outputs: int, inputs: int) -> Tensor:
        return self._whole(f"{module}.weight", (outputs, inputs))

    def names(self) -> Set[str]:
        return frozenset()

    def put(self, name: str, tensor: Tensor) -> None:
        raise AssertionError("only what a checkpoint holds has parts")

    def finish(self, unused: Iterable[str] = ()) -> None:
        """Nothing can be left over."""

    def tell(self, timeline: StartTimeline) -> None:
        timeline.ended("repack")
