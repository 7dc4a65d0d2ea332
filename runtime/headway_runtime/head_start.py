"""What the system does for a start on another core while PyTorch is imported.

The import keeps one core busy for seconds, and nothing that needs it can begin before. Meanwhile the
checkpoint is read from its disk, and memory for packed weights is found and cleared (`cleared_memory`), which
takes ten times as long as writing them into it. Decides whether there is something to gain; imports no torch.
"""

import contextlib
import mmap
import os
import threading
from pathlib import Path

from headway_runtime import cleared_memory
from headway_runtime.checkpoint_files import checkpoint_files
from headway_runtime.engine_options import EngineOptions
from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.fit.placement import one_rank
from headway_runtime.memory import free_memory_bytes
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.quantization.choice import Quantization, choose_quantization
from headway_runtime.served_dtype import served_dtype
from headway_runtime.weight_memory import linear_bytes, plain_bytes

NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def begin(options: EngineOptions) -> None:
    """For the checkpoint that these options name. Does nothing where there is nothing to gain."""
    if options.load_format == "dummy":
        return
    folder = Path(options.model_path)
    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=read_ahead, args=(folder,), name="headway-read-ahead", daemon=True).start()
    if not is_for_cpu(options.device) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    # What is wrong with the model or the machine is told by who loads it.
    with contextlib.suppress(HeadwayRuntimeError, OSError):
        model = one_rank(read_model_config(folder), options.parallel.size)
        quantization = choose_quantization(options.quantization, folder)
        is_packed = served_dtype(options.dtype, model.dtype, quantization, is_cpu=True) == "bfloat16"
        num_bytes = _packed_bytes(model, quantization, compresses=False)
        if is_packed and num_bytes < free_memory_bytes():

            def num_wanted() -> int:
                if not weights_are_packed():
                    return 0
                compresses = options.weight_compression == "auto" and weights_are_compressed()
                return _packed_bytes(model, quantization, compresses=compresses)

            cleared_memory.prepare(num_bytes, num_wanted)


def is_for_cpu(device: str) -> bool:
    """Whether an engine that is told this device computes on a CPU, as far as can be told without PyTorch."""
    return device == "cpu" or (device == "auto" and not NVIDIA_DRIVER.exists())


def _packed_bytes(model: ModelConfig, quantization: Quantization, *, compresses: bool) -> int:
    """Of all weights that products read in a layout of their own."""
    num_bytes = linear_bytes(model, quantization, "bfloat16", has_code_products=True, compresses=compresses)
    if model.tie_word_embeddings:
        num_bytes += plain_bytes(model.vocab_size, model.hidden_size, "bfloat16", compresses=compresses)
    return num_bytes


def read_ahead(folder: Path) -> None:
    """Have the system read a checkpoint into its cache; what is wrong with it is told by who loads it."""
    with contextlib.suppress(HeadwayRuntimeError, OSError):
        for path in checkpoint_files(folder):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def weights_are_packed() -> bool:
    """Whether this processor's products want weights in another layout than a checkpoint's."""
    try:
        from headway_runtime.kernels.cpu.processor import multiplies_pairs
    except ImportError:
        return False
    return multiplies_pairs()


def weights_are_compressed() -> bool:
    """Whether it reads bfloat16 in 12 bits."""
    try:
        from headway_runtime.kernels.cpu.processor import reads_12_bits
    except ImportError:
        return False
    return reads_12_bits()
