"""What there is to compile for an engine, and whether it has been done on this machine before.

Triton keeps what it has compiled in a folder. Beside it stands an empty file for each engine whose kernels
are all there, by a digest of all that they hang on; whoever empties the folder takes these files with it.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from headway_runtime.config import EngineConfig
from headway_runtime.kernels.triton import overlap
from headway_runtime.kernels.triton.launch import Gpu
from headway_runtime.parallel.share import Share
from headway_runtime.quantization.choice import OLD_FILES, OTHER_FILES

ENGINE_FOLDER = Path(__file__).parents[1]
SOURCE_SUFFIXES = (".py", ".json")
# Of a model's folder, those that say of what shapes and types its weights are; it may lack all but one.
MODEL_FILES = ("config.json", *OLD_FILES, *OTHER_FILES)


@dataclass(frozen=True, slots=True)
class CompileOrder:
    """share: of the model, this rank's. num_processes: that compile at once. parent_pid: who waits for it."""

    config: EngineConfig
    gpu: Gpu
    share: Share
    num_processes: int
    parent_pid: int

    @property
    def is_done(self) -> bool:
        return self._mark().exists()

    def done(self) -> None:
        """All of it is compiled. OSError where nothing can be written."""
        self._mark().parent.mkdir(parents=True, exist_ok=True)
        self._mark().touch()

    def _mark(self) -> Path:
        return Path(triton.knobs.cache.dir, f"headway-{self._digest()}")

    def _digest(self) -> str:
        """Of kernels, versions and all that says how they are launched; where the model lies says nothing."""
        config = self.config
        speculative = config.speculative
        neutral = replace(
            config,
            model_path="",
            limits=replace(config.limits, max_num_seqs=0, max_num_batched_tokens=0, num_speculative_tokens=0),
            num_threads=0,
            seed=0,
            max_waiting=0,
            offload=None,
            speculative=None if speculative is None else replace(speculative, model_path=None),
        )
        found = hashlib.sha256()
        versions = torch.__version__, triton.__version__
        # Launches that overlap are of kernels of their own.
        for told in (neutral, self.gpu, self.share.size, *versions, overlap.ENABLED):
            found.update(repr(told).encode() + b"\n")
        folders = [config.model_path, None if speculative is None else speculative.model_path]
        files = [Path(folder, name) for folder in folders if folder is not None for name in MODEL_FILES]
        for file in files:
            found.update(file.read_bytes() if file.exists() else b"-")
        for source in _sources():
            found.update(source)
        return found.hexdigest()


def _sources() -> list[bytes]:
    """All of the engine, with the tables of how kernels are launched: any file that is another one may launch
    another kernel."""
    found = sorted(file for file in ENGINE_FOLDER.rglob("*") if file.suffix in SOURCE_SUFFIXES)
    return [file.read_bytes() for file in found]
