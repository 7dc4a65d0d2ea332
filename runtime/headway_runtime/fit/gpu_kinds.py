"""Kinds of GPU: memory, bandwidth and arithmetic, from vendors' public data sheets.

FLOPs are dense, with sums in float32: where a sheet gives them "with sparsity", half of that; where it gives
those of a board of several GPUs (HGX B200), one's share. Memory is what the driver reports in
all (`nvidia-smi`, `rocm-smi`), which is what there is to fill; data sheets round it.
"""

from dataclasses import dataclass

from headway_runtime.fit.placement import Placement
from headway_runtime.model_config import StoredDtype

MIB = 2**20
TERA = 10**12
GIGA = 10**9
# Of `layers.kernel_choice`: from this on Triton's kernels run. 80 is 8.0.
LEAST_CAPABILITY = 80
# Of a GPU that is in no table: the most that one of NVIDIA's here has.
MULTIPROCESSORS_UNTOLD = 148


@dataclass(frozen=True, slots=True)
class GpuKind:
    """fp8_flops, int8_flops: of 8-bit floats and integers; None where they are not multiplied, or not told.
    has_bfloat16: whether matrix units know it. has_cuda: or ROCm.

    capability: as CUDA numbers it, 90 for 9.0; AMD's as PyTorch does. num_multiprocessors: or compute units.
    """

    name: str
    product: str
    memory_bytes: int
    bytes_per_second: int
    flops: float
    fp8_flops: float | None
    source: str
    capability: int
    num_multiprocessors: int
    int8_flops: float | None = None
    has_bfloat16: bool = True
    has_cuda: bool = True

    @property
    def runs_triton(self) -> bool:
        """Whether Triton's kernels run, which are written for CUDA."""
        return self.has_cuda and self.capability >= LEAST_CAPABILITY


def gpu_placement(dtype: StoredDtype, kind: GpuKind | None) -> Placement:
    """kind: None for one that is in no table, which counts as one that is new enough for Triton's kernels."""
    if kind is None:
        return Placement(is_cpu=False, dtype=dtype, num_multiprocessors=MULTIPROCESSORS_UNTOLD)
    own = kind.num_multiprocessors if kind.runs_triton else 0
    return Placement(is_cpu=False, dtype=dtype, num_multiprocessors=own)


def _kind(
    name: str,
    product: str,
    memory_mib: int,
    gigabytes_per_second: int,
    teraflops: float,
    fp8_teraflops: float | None,
    source: str,
    capability: int,
    num_multiprocessors: int,
    int8_teraops: float,
    *,
    has_bfloat16: bool = True,
    has_cuda: bool = True,
) -> GpuKind:
    fp8 = None if fp8_teraflops is None else fp8_teraflops * TERA
    return GpuKind(
        name,
        product,
        memory_mib * MIB,
        gigabytes_per_second * GIGA,
        teraflops * TERA,
        fp8,
        source,
        capability,
        num_multiprocessors,
        int8_teraops * TERA,
        has_bfloat16,
        has_cuda,
    )


GPU_KINDS: dict[str, GpuKind] = {
    one.name: one
    for one in (
        _kind("t4", "T4", 15360, 320, 65, None, "NVIDIA T4 data sheet", 75, 40, 130, has_bfloat16=False),
        _kind("a10", "A10", 23028, 600, 125, None, "NVIDIA A10 data sheet", 86, 72, 250),
        _kind("l4", "L4", 23034, 300, 121, 242.5, "NVIDIA L4 data sheet", 89, 58, 242.5),
        _kind(
            "rtx4090",
            "GeForce RTX 4090",
            24564,
            1008,
            165.2,
            330.3,
            "NVIDIA Ada GPU architecture white paper",
            89,
            128,
            660.6,
        ),
        _kind("a100-40g", "A100 SXM 40GB", 40960, 1555, 312, None, "NVIDIA A100 data sheet", 80, 108, 624),
        _kind("l40s", "L40S", 46068, 864, 362, 733, "NVIDIA L40S data sheet", 89, 142, 733),
        _kind("a6000", "RTX A6000", 49140, 768, 154.8, None, "NVIDIA RTX A6000 data sheet", 86, 84, 309.7),
        _kind(
            "rtx6000-ada",
            "RTX 6000 Ada",
            49140,
            960,
            364.2,
            728.5,
            "NVIDIA RTX 6000 Ada Generation data sheet",
            89,
            142,
            728.5,
        ),
        _kind("a100-80g", "A100 SXM 80GB", 81920, 2039, 312, None, "NVIDIA A100 data sheet", 80, 108, 624),
        _kind("h100-80g", "H100 SXM 80GB", 81559, 3350, 989.5, 1979, "NVIDIA H100 data sheet", 90, 132, 1979),
        _kind(
            "h100-nvl", "H100 NVL 94GB", 95830, 3938, 835.5, 1670.5, "NVIDIA H100 data sheet", 90, 132, 1670.5
        ),
        _kind("h20", "H20 96GB", 97871, 4000, 148, 296, "NVIDIA H20 data sheet", 90, 78, 296),
        _kind("h200", "H200 SXM 141GB", 143771, 4800, 989.5, 1979, "NVIDIA H200 data sheet", 90, 132, 1979),
        _kind(
            "b200", "B200 SXM 180GB", 183359, 8000, 2250, 4500, "NVIDIA HGX B200 data sheet", 100, 148, 4500
        ),
        _kind(
            "mi300x",
            "Instinct MI300X",
            196592,
            5300,
            1307.4,
            2614.9,
            "AMD Instinct MI300X data sheet",
            94,
            304,
            2614.9,
            has_cuda=False,
        ),
    )
}
