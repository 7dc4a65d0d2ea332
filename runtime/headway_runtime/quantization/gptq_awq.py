"""What GPTQ's tools (AutoGPTQ, GPTQModel) and AWQ's (AutoAWQ, GPTQModel) write about their weights."""

from dataclasses import replace

from headway_runtime.quantization.fields import UNQUANTIZED, Fields
from headway_runtime.quantization.scheme import (
    EVERYTHING,
    CheckpointQuantization,
    Layout,
    Rule,
    Scheme,
    part_of_name,
)

# How weights were found, who found them, and what other programs do with them.
HARMLESS = frozenset(
    {
        *("act_group_aware", "auto_gptq_version", "autoround_version", "backend", "backend_options"),
        "batch_size",
        *(
            "block_name_to_quantize",
            "cache_block_outputs",
            "cache_examples_on_gpu",
            "calib_data",
            "calibration",
        ),
        *("damp_auto_increment", "damp_percent", "dataset", "desc_act_groups", "disable_exllama", "do_fuse"),
        *("exllama_config", "failsafe", "fallback", "fuse_max_seq_len", "hyb_act", "mse", "max_input_length"),
        *("meta", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_dequantize_dtype"),
        *("module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "offload"),
        *(
            "offload_to_disk",
            "offload_to_disk_path",
            "pack_impl",
            "pad_token_id",
            "quant_method",
            "static_groups",
        ),
        *("tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "vram_strategy", "gc_mode"),
    }
)
GPTQ_VERSIONS = ("gptq", "gptq_v2")
# Programs that had AWQ's codes in an order of their own. Others' names say only which kernel was to multiply.
AWQ_BACKENDS_WITH_OWN_LAYOUT = ("llm-awq", "gemv", "gemv_fast")


def read_gptq(fields: Fields) -> CheckpointQuantization:
    _refuse_other_formats(fields)
    version = _version(fields)
    fields.choice("pack_dtype", ("int32",), "int32")
    scheme = _scheme(fields, "gptq", bits_name="bits", zero_offset=1 if version == "gptq" else 0)
    scheme = replace(scheme, zeros_borrow=_is_of_gptqmodel(fields))
    rules = [*_dynamic_rules(fields, scheme), *_head_rules(fields)]
    fields.finish(HARMLESS)
    return CheckpointQuantization("gptq", (*rules, Rule(EVERYTHING, scheme)))


def read_awq(fields: Fields) -> CheckpointQuantization:
    """`desc_act`, which GPTQModel sets, is passed over: groups of AWQ are of inputs as they come."""
    _refuse_other_formats(fields)
    for name in ("version", "format", "checkpoint_format"):
        fields.choice(name, ("gemm",), "gemm")
    if fields.get("backend") in AWQ_BACKENDS_WITH_OWN_LAYOUT:
        raise fields.error("backend", f"its layout is not supported; quantize it anew, or {UNQUANTIZED}")
    fields.choice("pack_dtype", ("int32",), "int32")
    old_name = fields.get("bits") is None and fields.get("w_bit") is not None
    bits_name = "w_bit" if old_name else "bits"
    fields.choice(bits_name, (4,))
    group_name = "q_group_size" if fields.get("group_size") is None else "group_size"
    has_zeros = fields.boolean("zero_point", default=not fields.boolean("sym", default=False))
    fields.boolean("desc_act", default=False)
    group_size = fields.group_size(group_name)
    scheme = Scheme(
        "awq",
        4,
        "channel" if group_size is None else "group",
        group_size=group_size,
        is_symmetric=not has_zeros,
    )
    skipped = fields.names("modules_to_not_convert")
    rules = [Rule(part_of_name(name), None) for name in skipped]
    rules += [*_dynamic_rules(fields, scheme), *_head_rules(fields)]
    fields.finish(HARMLESS)
    return CheckpointQuantization("awq", (*rules, Rule(EVERYTHING, scheme)))


def _version(fields: Fields) -> str:
    """How zero points are stored: less 1 ("gptq", and AutoGPTQ before it said so), or as they are."""
    declared = fields.get("checkpoint_format") is not None
    version = fields.choice("checkpoint_format", GPTQ_VERSIONS, "gptq")
    other = fields.choice("format", GPTQ_VERSIONS, version)
    if declared and other != version:
        raise fields.error(
            "checkpoint_format",
            f"format={other!r} says otherwise, and zero points mean another number by each; correct either",
        )
    return other


def _is_of_gptqmodel(fields: Fields) -> bool:
    """Whether `meta.quantizer` names GPTQModel."""
    meta = fields.get("meta")
    quantizers = meta.get("quantizer", []) if isinstance(meta, dict) else []
    named = [quantizers] if isinstance(quantizers, str) else quantizers
    return any(str(one).lower().startswith("gptqmodel") for one in named)


def _refuse_other_formats(fields: Fields) -> None:
    for name in ("is_marlin_format", "adapter", "rotation", "lm_head_quantized"):
        if fields.get(name):
            raise fields.error(name, "is not supported; quantize the model anew without")


def _scheme(fields: Fields, layout: Layout, *, bits_name: str, zero_offset: int) -> Scheme:
    group_size = fields.group_size("group_size")
    return Scheme(
        layout,
        fields.choice(bits_name, (4, 8)),
        "channel" if group_size is None else "group",
        group_size=group_size,
        is_symmetric=fields.boolean("sym", default=True),
        has_input_order=fields.boolean("desc_act", default=False),
        zero_offset=zero_offset,
    )


def _head_rules(fields: Fields) -> list[Rule]:
    return [] if fields.boolean("lm_head", default=False) else [Rule(part_of_name("lm_head"), None)]


def _dynamic_rules(fields: Fields, base: Scheme) -> list[Rule]:
    """GPTQModel's exceptions: "-:PATTERN" modules are left alone, "+:PATTERN" or "PATTERN" ones differ."""
    dynamic = fields.object("dynamic")
    rules: list[Rule] = []
    for name in [] if dynamic is None else dynamic.field_names:
        assert dynamic is not None
        pattern = dynamic.pattern(name, name.removeprefix("+:").removeprefix("-:"))
        if name.startswith("-:"):
            dynamic.get(name)
            rules.append(Rule(pattern, None))
            continue
        own = dynamic.object(name)
        if own is not None:
            rules.append(Rule(pattern, _changed(own, base)))
    return rules


def _changed(own: Fields, base: Scheme) -> Scheme:
    group_size = base.group_size if own.get("group_size") is None else own.group_size("group_size")
    has_order = own.boolean("desc_act", default=base.has_input_order)
    scheme = Scheme(
        base.layout,
        own.choice("bits", (4, 8) if base.layout == "gptq" else (4,), base.bits),
        "channel" if group_size is None else "group",
        group_size=group_size,
        is_symmetric=own.boolean("sym", default=base.is_symmetric),
        has_input_order=has_order and base.layout == "gptq",
        zero_offset=base.zero_offset,
        zeros_borrow=base.zeros_borrow,
    )
    own.finish(HARMLESS)
    return scheme
