"""Which files of a folder hold a model's weights. Only safetensors are ever opened. Imports no torch."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from headway_runtime.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What AutoGPTQ calls the single file, by bits and group size: gptq_model-4bit-128g.safetensors. The index of
# its shards is called so with the usual ending.
INDEX_SUFFIX = ".index.json"
GPTQ_FILE = re.compile(r"gptq_model-\d+bit-(-1|\d+)g\.safetensors(\.index\.json)?", re.ASCII)
# A safetensors file begins with its header's length, and the header; the format's own limit.
LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000


def checkpoint_files(folder: Path) -> list[Path]:
    """The single file, or the shards that an index names. ModelLoadError if there is neither."""
    found = model_files(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if len(found) > 1:
        raise ModelLoadError(
            f"{folder}: holds {' and '.join(map(repr, found))}, each of which may be the model; keep the "
            f"one that config.json is of, or rename it {INDEX_FILE if is_index(found[0]) else SINGLE_FILE}"
        )
    if not found:
        raise ModelLoadError(
            f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors checkpoints are read, "
            "so convert other formats first"
        )
    index = folder / found[0]
    if not is_index(index.name):
        return [index]
    names = {str(name) for name in _weight_map(index).values()}
    for name in sorted(names):
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelLoadError(
                f"{index}: names {name!r}, which is no file beside it; copy the checkpoint again"
            )
    return [folder / name for name in sorted(names)]


def model_files(names: Iterable[str]) -> list[str]:
    """Those of these files that may stand for a whole model, each an index of shards or a single file.

    One of the usual names, the index first, hides all others; else those of AutoGPTQ's names.
    """
    known = sorted(names)
    for usual in (INDEX_FILE, SINGLE_FILE):
        if usual in known:
            return [usual]
    return [one for one in known if GPTQ_FILE.fullmatch(one)]


def is_index(name: str) -> bool:
    """Whether a file of that name says which shards hold which tensors."""
    return name == INDEX_FILE or (name.endswith(INDEX_SUFFIX) and bool(GPTQ_FILE.fullmatch(name)))


def indexed_tensors(folder: Path) -> dict[str, Path]:
    """Where an index says that each tensor is; empty without one."""
    found = model_files(path.name for path in folder.iterdir())
    if len(found) != 1 or not is_index(found[0]):
        return {}
    return {str(tensor): folder / str(name) for tensor, name in _weight_map(folder / found[0]).items()}


def placed_tensors(names: Mapping[Path, Iterable[str]], indexed: Mapping[str, Path]) -> dict[str, Path]:
    """The file of each tensor. names: what each file holds. indexed: what `indexed_tensors` found.

    That decides where several hold one of the same name; ModelLoadError where it says nothing of it.
    """
    found: dict[str, Path] = {}
    for path, held in names.items():
        for name in held:
            if name in found and indexed.get(name) not in (found[name], path):
                raise ModelLoadError(
                    f"{path}: tensor {name!r} is in {found[name].name!r}, too, and no index says "
                    "which of them counts; copy the checkpoint again into an empty folder"
                )
            if name not in found or indexed.get(name) == path:
                found[name] = path
    return found


def _weight_map(index: Path) -> dict[str, object]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        return dict(found.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{index}: cannot be read ({error!r}); copy the checkpoint again") from error
