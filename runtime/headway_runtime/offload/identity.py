"""What a block's bytes depend on besides its key, as the name of a folder: what differs never meets.

A block's key names the tokens, the salt and the adapter. A file outlives the engine that wrote it, and the
next one may serve other weights from the same path: so all weights are read once and hashed, on the thread
that calls this, and the result is kept for as long as no file's size or time of change is another.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway_runtime.quantization.choice import OLD_FILES

# Another one whenever what lies in a block, or how it is computed, changes.
LAYOUT_VERSION = 1
_DIGESTS_FILE = "weights.json"


def folder_name(parts: Mapping[str, object], model_path: Path, kept_in: Path) -> str:
    """Of the folder for blocks that such an engine computes. OSError if the weights cannot be read.

    parts: plain values; all that may differ between two engines over the same files.
    """
    described = {
        **parts,
        "layout": LAYOUT_VERSION,
        "config": _digest(model_path / "config.json"),
        "weights": weights_digest(model_path, kept_in),
        # Of a folder without them nothing is said, so that its blocks of before are still found.
        **{name: _digest(model_path / name) for name in OLD_FILES if (model_path / name).is_file()},
    }
    text = json.dumps(described, sort_keys=True)
    return f"headway-kv-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _old_files(model_path: Path) -> Iterator[tuple[str, Path]]:
    for name in OLD_FILES:
        if (model_path / name).is_file():
            yield name, model_path / name


def weights_digest(model_path: Path, kept_in: Path) -> str:
    """sha256 over all safetensors files' names and contents."""
    files = sorted(model_path.glob("*.safetensors"))
    seen = {str(one.resolve()): [one.stat().st_size, one.stat().st_mtime_ns] for one in files}
    fresh_for = hashlib.sha256(json.dumps(seen).encode()).hexdigest()
    notes = _read_notes(kept_in / _DIGESTS_FILE)
    if fresh_for in notes:
        return notes[fresh_for]
    total = hashlib.sha256()
    for one in files:
        with one.open("rb") as file:
            total.update(f"{one.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    notes[fresh_for] = total.hexdigest()
    temporary = kept_in / f"{_DIGESTS_FILE}.part"
    with contextlib.suppress(OSError):  # it is only sooner known the next time
        temporary.write_text(json.dumps(notes))
        temporary.rename(kept_in / _DIGESTS_FILE)
    return notes[fresh_for]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_notes(path: Path) -> dict[str, str]:
    try:
        notes = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(notes, dict):
        return {}
    return {str(name): str(digest) for name, digest in notes.items()}
