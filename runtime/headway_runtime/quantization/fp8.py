"""What FP8 checkpoints say with `quant_method: fp8`: blocks (DeepSeek, Qwen) or single scales (AutoFP8)."""

from headway_runtime.quantization.fields import Fields
from headway_runtime.quantization.scheme import EVERYTHING, CheckpointQuantization, Rule, Scheme, part_of_name

# kv_cache_scheme: see `kv_scheme`. scale_fmt: scales are numbers, however they were rounded.
HARMLESS = frozenset(
    {"kv_cache_scheme", "kv_cache_quant_method", "quant_method", "scale_fmt", "use_deep_gemm", "dequantize"}
)


def read_fp8(fields: Fields) -> CheckpointQuantization:
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    is_static = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block = fields.block("weight_block_size")
    scheme = Scheme(
        "plain",
        8,
        "channel" if block is None else "block",
        is_float=True,
        block=block,
        has_input_scale=is_static,
    )
    skipped = fields.names("modules_to_not_convert", "ignored_layers")
    fields.finish(HARMLESS)
    rules = [Rule(part_of_name(name), None) for name in [*skipped, "lm_head"]]
    return CheckpointQuantization("fp8", (*rules, Rule(EVERYTHING, scheme)))
