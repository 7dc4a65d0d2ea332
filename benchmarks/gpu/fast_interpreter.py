"""Triton's interpreter without what it does over and over: small kernels take two fifths of the time.

For processes that interpret for good, which are those of tests and of `--smoke`. Written against Triton 3.9's
`runtime/interpreter.py`, of which it replaces parts that are not public.
"""

from dataclasses import replace
from functools import cache
from typing import Any


def hasten() -> None:
    """Once per process, before any kernel runs. Triton must interpret."""
    _patch_the_language_once()
    _describe_types_once()
    _look_conversions_up()
    _leave_overflows()


def _patch_the_language_once() -> None:
    """The interpreter puts its own meaning on triton.language at each launch and each call of a function
    in a kernel, and takes it back after the launch."""
    from triton.runtime import interpreter

    internals: Any = interpreter
    patch = cache(internals._patch_lang)

    def patched(function: object) -> object:
        patch(function)
        return internals._LangPatchScope()

    internals._patch_lang = patched


def _describe_types_once() -> None:
    """Each value of a kernel has a block type, a shape of constants and a type of NumPy's made for it."""
    from triton.language import core
    from triton.runtime import interpreter

    internals: Any = interpreter
    block_type: Any = core.block_type
    tensor: Any = core.tensor
    make_type, make_tensor, numpy_type = block_type.__init__, tensor.__init__, internals._get_np_dtype
    of_scalars = cache(numpy_type)
    types: dict[tuple[object, ...], dict[str, object]] = {}
    shapes: dict[tuple[object, ...], tuple[object, object]] = {}

    def typed(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = [getattr(one, "value", one) for one in shape]
        # 16 and 16.0 are equal, and only one of them is a length.
        space = getattr(element_ty, "address_space", None)
        key = (element_ty.name, space, *lengths, *map(type, lengths))
        if (known := types.get(key)) is None:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        else:
            vars(self).update(known)

    def begun(self: Any, handle: object, type: Any) -> None:  # noqa: A002 - Triton calls it so
        key = tuple(type.shape.values) if type.is_block() else ()
        if (known := shapes.get(key)) is None:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    def numpy_typed(type: object) -> object:  # noqa: A002
        return (
            of_scalars(type) if isinstance(type, core.dtype) and not _is_compound(type) else numpy_type(type)
        )

    block_type.__init__, tensor.__init__, internals._get_np_dtype = typed, begun, numpy_typed


def _is_compound(type: Any) -> bool:  # noqa: A002
    """A block or a pointer, which Triton cannot hash."""
    return bool(type.is_block() or type.is_ptr())


def _look_conversions_up() -> None:
    """Numbers of 8 and 16 bits are converted bit by bit: all there are, once, and then looked up. What
    becomes of float32 in bfloat16 is its upper half, but for numbers so small that they have no leading one,
    of which the interpreter makes something of its own."""
    import numpy as np
    from triton.runtime import interpreter

    internals: Any = interpreter
    convert = internals._convert_float
    tables: dict[tuple[object, ...], Any] = {}

    def looked_up(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: object) -> Any:  # noqa: A002
        width = input_dtype.primitive_bitwidth
        if width > 16:
            if (input_dtype.name, output_dtype.name, rounding_mode) == ("fp32", "bf16", None):
                bits = np.asarray(input, order="C").view(np.uint32)
                is_small = (bits & 0x7F800000) == 0
                if not np.any(bits[is_small] & 0x7FFFFF):
                    return (bits >> 16).astype(np.uint16)
            return convert(input, input_dtype, output_dtype, rounding_mode)
        key = (input_dtype.name, output_dtype.name, rounding_mode)
        if (table := tables.get(key)) is None:
            every = np.arange(1 << width, dtype=np.uint16 if width == 16 else np.uint8)
            table = tables[key] = convert(every, input_dtype, output_dtype, rounding_mode)
        return table[np.asarray(input, order="C").view(np.uint16 if width == 16 else np.uint8)]

    internals._convert_float = looked_up


def _leave_overflows() -> None:
    """Each sum is computed in 64 bits as well, and what came of it is looked at in `debug` alone."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
