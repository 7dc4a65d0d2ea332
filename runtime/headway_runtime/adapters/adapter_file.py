"""Reads `adapter_model.safetensors`: the two matrices of each layer, checked against the model they change.

A layer is known here by its name below the model's own prefix, such as `layers.3.self_attn.q_proj`, since
checkpoints and versions of transformers differ in what stands before. Every tensor of the file has to have
its place: what is left over would be a part of the adapter that is silently not applied.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway_runtime.adapters.peft_config import CONFIG_FILE, PeftConfig, read_peft_config
from headway_runtime.errors import ModelLoadError

WEIGHTS_FILE = "adapter_model.safetensors"
# What PEFT puts before the model's own names.
PEFT_PREFIX = "base_model.model."
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MATRIX = re.compile(r"(.+)\.lora_([AB])\.(?:default\.)?weight")
_OTHER_PARTS = {
    "lora_magnitude_vector": "is of a DoRA adapter, which is not supported; train it with use_dora=false",
    "lora_embedding_": "changes embeddings, which is not supported; train it for linear layers alone",
    "lora_bias": "is a bias of B, which is not supported; train it with lora_bias=false",
    "modules_to_save": "is a whole layer, which is not exchanged; train it without modules_to_save",
}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What of a model's linear layers an adapter may change: inputs and outputs as a checkpoint has them."""

    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class LayerDelta:
    """What is added to one linear layer: x @ a.T @ b.T. a: [rank, inputs]; b: [outputs, rank], scaled."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter's contents, by layer."""

    config: PeftConfig
    digest: bytes
    deltas: Mapping[str, LayerDelta]

    @property
    def rank(self) -> int:
        """The largest."""
        return max((len(one.a) for one in self.deltas.values()), default=0)


def read_adapter(
    folder: Path, layers: Mapping[str, LayerShape], prefixes: Sequence[str], max_rank: int
) -> AdapterFile:
    """ModelLoadError, naming file and field or tensor, for what does not fit the model.

    layers: those that may have an adapter. prefixes: what may stand before their names. max_rank: the flag's.
    """
    config = read_peft_config(folder)
    path = folder / WEIGHTS_FILE
    digest = _digest(folder / CONFIG_FILE, path)
    pairs = _pairs(path, prefixes, layers, config)
    if not pairs:
        raise ModelLoadError(f"{path}: holds no tensor of an adapter; copy the adapter again")
    deltas = {
        module: _delta(path, found, layers[module], config, max_rank) for module, found in pairs.items()
    }
    # Patterns are for names as the file has them.
    before = {found.name.removesuffix(module) for module, found in pairs.items()}
    for module in layers:
        if module not in pairs and any(config.is_target(f"{one}{module}") for one in before):
            raise ModelLoadError(
                f"{path}: has no tensors for {module!r}, which {CONFIG_FILE} names in target_modules"
                f"{_of_base(config)}; the adapter is of another base model, or incomplete"
            )
    # What is read must be what the digest names: KV is kept under it, on a disk for longer than this process.
    if _digest(folder / CONFIG_FILE, path) != digest:
        raise ModelLoadError(f"{path}: changed while it was read; load it again once it is written whole")
    return AdapterFile(config, digest, deltas)


@dataclass(frozen=True, slots=True)
class _Found:
    """One layer's tensors. name: as the file has it, which is what patterns of the configuration are for."""

    name: str
    matrices: dict[str, Tensor]


def _pairs(
    path: Path, prefixes: Sequence[str], layers: Mapping[str, LayerShape], config: PeftConfig
) -> dict[str, _Found]:
    """Matrices "A" and "B" by layer."""
    pairs: dict[str, _Found] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                module, written, which = _place(path, name, prefixes, layers, config)
                pairs.setdefault(module, _Found(written, {})).matrices[which] = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"{path}: cannot be read ({error}); only safetensors are read: copy the adapter again, or save "
            "it with safe_serialization=True"
        ) from error
    return pairs


def _place(
    path: Path, name: str, prefixes: Sequence[str], layers: Mapping[str, LayerShape], config: PeftConfig
) -> tuple[str, str, str]:
    """The layer that a tensor belongs to, its name in the file, and which of its matrices the tensor is."""
    for part, complaint in _OTHER_PARTS.items():
        if part in name:
            raise ModelLoadError(f"{path}: tensor {name!r} {complaint}")
    match = _MATRIX.fullmatch(name.removeprefix(PEFT_PREFIX))
    if match is None:
        raise ModelLoadError(
            f"{path}: tensor {name!r} is neither lora_A nor lora_B of a layer; nothing else is supported"
        )
    module = match[1]
    own = next((module.removeprefix(one) for one in prefixes if module.startswith(one)), module)
    if own in layers:
        return own, module, match[2]
    if ".experts." in own or own.endswith((".experts", "mlp.gate", "block_sparse_moe.gate")):
        complaint = "changes a mixture's experts or its router, which is not supported"
    elif own.endswith(("lm_head", "embed_tokens")):
        complaint = "changes the LM head or the embeddings, which is not supported"
    else:
        complaint = f"belongs to {module!r}, which this model does not have{_of_base(config)}"
    raise ModelLoadError(f"{path}: tensor {name!r} {complaint}; {_REMEDY}")


def _delta(path: Path, found: _Found, shape: LayerShape, config: PeftConfig, max_rank: int) -> LayerDelta:
    module, matrices = found.name, found.matrices
    for which in "AB":
        if which not in matrices:
            raise ModelLoadError(f"{path}: {module!r} has no lora_{which}; copy the adapter again")
    rank = config.rank_of(module)
    if rank > max_rank:
        raise ModelLoadError(
            f"{config.path}: {module!r} has rank {rank}, more than --max-lora-rank={max_rank}; raise that"
        )
    wanted = {"A": (rank, shape.num_inputs), "B": (shape.num_outputs, rank)}
    for which, tensor in matrices.items():
        if tuple(tensor.shape) != wanted[which]:
            raise ModelLoadError(
                f"{path}: lora_{which} of {module!r} has shape {tuple(tensor.shape)!r}, this model and "
                f"{CONFIG_FILE} (r) ask for {wanted[which]!r}{_of_base(config)}; {_REMEDY}"
            )
        if tensor.dtype not in _FLOATS:
            raise ModelLoadError(
                f"{path}: lora_{which} of {module!r} is {tensor.dtype}; want bfloat16, float16 or float32"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelLoadError(
                f"{path}: lora_{which} of {module!r} holds numbers that are infinite or none; copy it again"
            )
    scale = config.scale_of(module)
    b = matrices["B"].float() * scale
    if not bool(torch.isfinite(b).all()):
        raise ModelLoadError(
            f"{config.path}: {module!r} is scaled by {scale!r} (lora_alpha, alpha_pattern), with which its "
            "lora_B holds infinite numbers; correct the file"
        )
    return LayerDelta(matrices["A"].float(), b)


_REMEDY = "use an adapter that was trained for this model"


def _of_base(config: PeftConfig) -> str:
    """Which model the adapter says that it is of."""
    return f" ({CONFIG_FILE} says base_model_name_or_path={config.base_model!r})" if config.base_model else ""


def _digest(*paths: Path) -> bytes:
    """Of the files' contents. ModelLoadError if one is not there."""
    found = hashlib.sha256(b"headway adapter")
    for path in paths:
        try:
            with path.open("rb") as opened:
                found.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise ModelLoadError(
                f"{path}: cannot be read ({error.strerror}); give the folder of an adapter as PEFT's "
                "save_pretrained writes it, in safetensors"
            ) from error
    return found.digest()
