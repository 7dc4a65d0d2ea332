"""Which way tensors take from their files to a device."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from headway_runtime.cpus import usable_cpus
from headway_runtime.weight_stream.lanes import (
    NUM_THREADS,
    CudaLane,
    Lane,
    Lanes,
    Ordering,
    release_pinned_memory,
)
from headway_runtime.weight_stream.streamed_files import StreamedFiles
from headway_runtime.weight_stream.tensor_files import MappedFiles, TensorFiles


def open_tensor_files(
    paths: Sequence[Path], device: torch.device, indexed: Mapping[str, Path]
) -> TensorFiles:
    """indexed: the file of each tensor, as an index has it. ModelLoadError for files that cannot be read."""
    if device.type != "cuda":
        return MappedFiles(paths, device, indexed)

    def make_lane() -> Lane:
        torch.cuda.set_device(device)  # of this thread
        return CudaLane(device)

    def mark() -> Ordering:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    lanes = Lanes(make_lane, min(NUM_THREADS, max(2, usable_cpus())), release_pinned_memory)
    return StreamedFiles(paths, device, lanes, mark, indexed)
