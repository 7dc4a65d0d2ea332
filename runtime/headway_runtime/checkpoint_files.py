"""Which files of a folder hold a model's weights. Only safetensors are ever opened. Imports no torch."""

import json
from pathlib import Path

from headway_runtime.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# A safetensors file begins with its header's length, and the header; the format's own limit.
LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000


def checkpoint_files(folder: Path) -> list[Path]:
    """The single file, or the shards that an index names. ModelLoadError if there is neither."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        raise ModelLoadError(
            f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors checkpoints are read, "
            "so convert other formats first"
        )
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index}: cannot be read ({error!r}); copy the checkpoint again") from error
    for name in sorted(map(str, names)):
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelLoadError(
                f"{index}: names {name!r}, which is no file beside it; copy the checkpoint again"
            )
    return [folder / str(name) for name in sorted(names)]
