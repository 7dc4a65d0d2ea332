"""What a replica is made of, as far as its speed depends on it: what advice about levers starts from."""

from dataclasses import dataclass

from headway_operator.spec import InferenceServiceSpec

FOUR_BITS = ("int4", "awq", "gptq")


@dataclass(frozen=True, slots=True)
class Build:
    """What a replica is, as far as its speed depends on it. quantization, kv_cache_dtype: as the spec names
    them."""

    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    has_gpu: bool = False


UNKNOWN = Build()


def build_of(spec: InferenceServiceSpec) -> Build:
    """Read it from a spec."""
    return Build(
        quantization="int4" if spec.quantization in FOUR_BITS else spec.quantization,
        kv_cache_dtype=spec.kv_cache_dtype,
        tensor_parallel_size=spec.tensor_parallel_size,
        has_gpu=spec.has_gpu,
    )
