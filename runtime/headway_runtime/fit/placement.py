"""Where and how weights are held, as far as that decides their bytes; and one rank's share of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from headway_runtime.config import WeightCompression
from headway_runtime.errors import ConfigError
from headway_runtime.memory import DTYPE_BYTES
from headway_runtime.model_config import ModelConfig, StoredDtype
from headway_runtime.parallel.share import vocabulary_rows


@dataclass(frozen=True, slots=True)
class Placement:
    """dtype: of the arithmetic, and of what is not quantized.

    packs_plain: whether plain weights of linear layers get a layout of their own, so that a head that is tied
        to the embedding is there twice. has_strips: whether coded weights lie as CPU kernels read them.
    compresses: whether plain weights of linear layers lie in 12 bits each, where sizes allow it.
    has_kernels: whether attention and the MLP's middle are CPU kernels' work.
    has_integer_products: whether kernels turn inputs of W8A8 products into integers; else PyTorch does.
    num_threads: what strips are cut for.
    attends_by_products: whether chunks attend by batched products, where there are kernels; else by PyTorch's
        own attention.
    widens: whether many rows are multiplied in float32, as there are no products of dtype.
    multiplies_halves: whether dtype is float16 and has products, which copy what they multiply.
    num_multiprocessors: of a GPU on which Triton's kernels run; 0 where all is left to PyTorch, and on a CPU.
    """

    is_cpu: bool
    dtype: StoredDtype
    packs_plain: bool = False
    has_strips: bool = False
    has_kernels: bool = False
    num_threads: int = 1
    compresses: bool = False
    has_integer_products: bool = False
    attends_by_products: bool = False
    widens: bool = False
    multiplies_halves: bool = False
    num_multiprocessors: int = 0

    @property
    def attends_in_pages(self) -> bool:
        """Whether kernels of a GPU read keys and values where they lie: nothing is gathered or masked."""
        return self.num_multiprocessors > 0

    @property
    def has_torch_int4(self) -> bool:
        """Whether products of 4-bit weights are PyTorch's, which reads their codes as they lie."""
        return self.is_cpu and self.dtype == "bfloat16" and not self.has_strips

    @property
    def number_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def this_processor(
    dtype: StoredDtype, num_threads: int, weight_compression: WeightCompression = "auto"
) -> Placement:
    """On this machine's CPU, as far as can be told without PyTorch."""
    packs_plain = by_products = has_strips = has_kernels = compresses = multiplies_integers = False
    widens = has_halves = False
    is_bfloat16, is_half = dtype == "bfloat16", dtype == "float16"
    try:
        from headway_runtime.kernels.cpu.processor import (
            has_features,
            multiplies_halves,
            packs_bfloat16,
            reads_12_bits,
        )
    except ImportError:
        pass
    else:
        # As `kernels.cpu` asks for: `compiler.NEEDED_ON_X86`, `coded_linear.NEEDED`, `NEEDED_FOR_INTEGERS`.
        has_kernels = has_features("avx2", "fma", "f16c") or has_features("neon")
        packs_plain = is_bfloat16 and packs_bfloat16()
        has_halves = is_half and multiplies_halves()
        widens = not packs_plain if is_bfloat16 else is_half and not has_halves
        by_products = dtype == "float32" or packs_plain
        has_strips = is_bfloat16 and has_features("avx512bf16", "avx512bw", "avx512vbmi")
        compresses = is_bfloat16 and weight_compression == "auto" and reads_12_bits()
        multiplies_integers = is_bfloat16 and has_features("avx512bf16", "avx512bw", "avx512vnni")
    return Placement(
        True,
        dtype,
        packs_plain,
        has_strips,
        has_kernels,
        num_threads,
        compresses,
        multiplies_integers,
        by_products,
        widens,
        has_halves,
    )


def one_rank(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """What one of several ranks holds of a model: heads, middles and vocabulary cut, the rest on each.

    KV heads fewer than ranks are held several times. ConfigError for a number that does not divide the model.
    """
    if num_ranks == 1:
        return model
    for name, count in _cut(model).items():
        if count % num_ranks:
            raise ConfigError(
                f"tensor_parallel_size={num_ranks!r}: the model's {name}, {count}, is no multiple of it; "
                "choose a divisor"
            )
    num_kv_heads = model.num_kv_heads
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks!r}: {num_kv_heads} KV heads can be neither shared out among so "
            "many ranks nor held several times each; choose a divisor or a multiple"
        )
    experts = model.experts
    return replace(
        model,
        num_attention_heads=model.num_attention_heads // num_ranks,
        num_kv_heads=max(1, num_kv_heads // num_ranks),
        intermediate_size=model.intermediate_size // num_ranks,
        experts=None if experts is None else replace(experts, size=experts.size // num_ranks),
        vocab_size=vocabulary_rows(model.vocab_size, num_ranks),
    )


def _cut(model: ModelConfig) -> dict[str, int]:
    sizes = {"num_attention_heads": model.num_attention_heads}
    if not all(layer.has_experts for layer in model.layers):
        sizes["intermediate_size"] = model.intermediate_size
    if model.experts is not None:
        sizes["experts' intermediate size"] = model.experts.size
    return sizes


def can_cut(model: ModelConfig, num_ranks: int) -> bool:
    """Whether so many ranks can share the model."""
    return _succeeds(lambda: one_rank(model, num_ranks))


def _succeeds(work: Callable[[], object]) -> bool:
    try:
        work()
    except ConfigError:
        return False
    return True
