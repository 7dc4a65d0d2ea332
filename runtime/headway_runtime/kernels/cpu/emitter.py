"""Writes the machine-independent code (LLVM IR) of a kernel that runs on CPUs.

A kernel is Python that runs once and leaves code behind: what is a Python loop here is unrolled there, and
`Emitter.loop` makes a loop that stays one. Numbers are vectors of `width` float32 lanes; `Elements` says in
which type they lie in memory. Knows nothing of what the kernels compute, nor of how they are compiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

from llvmlite import ir

from headway_runtime.kernels.cpu.elements import F32, I8, I16, I32, I64, BFloat, Elements

# A kernel's one parameter is the address of its arguments, 64 bits each.
KERNEL_TYPE = ir.FunctionType(ir.VoidType(), [I64])
CACHE_LINE_BYTES = 64
# What optimisers may do to sums: put them in another order.
REASSOCIATE = ("reassoc", "contract", "nsz")

LOG2_E = 1.4426950408889634
# 2**x on [-0.5, 0.5], relative error below 2e-7: coefficients of its Taylor series, lowest power first.
EXP2_TERMS = (
    *(1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158),
    *(0.009618129107628477, 0.0013333558146428443, 0.00015403530393381609),
)
# Below any score, and yet finite.
LOWEST = -1e30
# Below, the result would not be a normal number; it is 0 or nearly.
LEAST_EXPONENT = -126.0
EXPONENT_BIAS, MANTISSA_BITS = 127, 23
ROUNDER = 1.5 * 2**MANTISSA_BITS


class Emitter:
    """One kernel under construction. Values are LLVM's: of type i64, float or <width x float>."""

    def __init__(self, name: str, width: int) -> None:
        self.width = width
        self.module = ir.Module(name)
        self.function = ir.Function(self.module, KERNEL_TYPE, name)
        self.vector = ir.VectorType(F32, width)
        self._entry = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.builder = ir.IRBuilder(self.function.append_basic_block("body"))

    def finish(self) -> str:
        """The module's text."""
        self._entry.branch(self.function.blocks[1])
        self.builder.ret_void()
        return str(self.module)

    # Integers and control.

    def integer(self, value: int) -> ir.Value:
        return ir.Constant(I64, value)

    def argument(self, index: int) -> ir.Value:
        """The kernel's argument of that index, an integer or an address."""
        return self.load_integer(self.function.args[0], self.integer(index))

    def argument_address(self, index: int) -> ir.Value:
        """Where that argument lies."""
        return self.offset(self.function.args[0], (self.integer(index), 8))

    def load_integer(self, address: ir.Value, index: ir.Value) -> ir.Value:
        return self.builder.load(self._pointer(address, index, 8, I64))

    def offset(self, address: ir.Value, *terms: tuple[ir.Value, int]) -> ir.Value:
        """`address` plus each index times so many bytes."""
        products = (self.builder.mul(index, self.integer(size)) for index, size in terms)
        total: ir.Value = reduce(self.builder.add, products, address)
        return total

    def local(self, count: int) -> ir.Value:
        """Address of `count` float32 of this thread's own."""
        place = self._entry.alloca(F32, count)
        place.align = 64
        return self._entry.ptrtoint(place, I64)

    @contextmanager
    def loop(self, stop: ir.Value | int, start: ir.Value | int = 0, step: int = 1) -> Iterator[ir.Value]:
        """The body is run with each integer from `start` to below `stop`."""
        stop, start = (self.integer(end) if isinstance(end, int) else end for end in (stop, start))
        counter = self._entry.alloca(I64)
        self.builder.store(start, counter)
        head, body, end = (self.function.append_basic_block(name) for name in ("head", "loop", "end"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.load(counter)
        self.builder.cbranch(self.builder.icmp_signed("<", index, stop), body, end)
        self.builder.position_at_end(body)
        yield index
        self.builder.store(self.builder.add(index, self.integer(step)), counter)
        self.builder.branch(head)
        self.builder.position_at_end(end)

    @contextmanager
    def tasks(self, counter: ir.Value, count: ir.Value) -> Iterator[ir.Value]:
        """The body is run for each task from 0 to below `count`, by whichever thread comes first.

        counter: address of an integer that is 0 before the threads start.
        """
        head, body, end = (self.function.append_basic_block(name) for name in ("next", "task", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        place = self.builder.inttoptr(counter, I64.as_pointer())
        task = self.builder.atomic_rmw("add", place, self.integer(1), "monotonic")
        self.builder.cbranch(self.builder.icmp_signed("<", task, count), body, end)
        self.builder.position_at_end(body)
        yield task
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def smaller_integer(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def larger_integer(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def prefetch(self, address: ir.Value, num_bytes: int, *, is_near: bool = True) -> None:
        """Ask for the cache lines from `address` on, which may be anywhere; is_near: in the nearest cache."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = self._declared("llvm.prefetch.p0", kind)
        options = [ir.Constant(I32, value) for value in (0, 3 if is_near else 2, 1)]  # to read, where, data
        for start in range(0, num_bytes, CACHE_LINE_BYTES):
            place = self.offset(address, (self.integer(start), 1))
            self.builder.call(function, [self.builder.inttoptr(place, I8.as_pointer()), *options])

    # Vectors.

    def splat(self, value: float | ir.Value) -> ir.Value:
        """All lanes alike."""
        if isinstance(value, float):
            return ir.Constant(self.vector, [value] * self.width)
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(I32, 0))
        return self._shuffled(first, first, [0] * self.width)

    def variable(self, value: ir.Value) -> "Variable":
        """A value that changes; the optimiser keeps it in a register."""
        place = self._entry.alloca(value.type)
        self.builder.store(value, place)
        return Variable(self, place)

    def load(self, address: ir.Value, index: ir.Value | int, elements: Elements) -> ir.Value:
        """`width` elements from the one at `index` on."""
        pointer = self._pointer(address, index, elements.num_bytes, self._stored(elements))
        raw = self.builder.load(pointer)
        raw.align = elements.num_bytes
        match elements.name:
            case "float32":
                return raw
            case "float16":
                return self.builder.fpext(raw, self.vector)
        return self._widened(raw)

    def store(self, value: ir.Value, address: ir.Value, index: ir.Value | int, elements: Elements) -> None:
        """The nearest numbers of that type, to even in the middle."""
        stored = self.builder.store(
            self._narrowed(value, elements),
            self._pointer(address, index, elements.num_bytes, self._stored(elements)),
        )
        stored.align = elements.num_bytes

    def load_bytes(self, address: ir.Value, index: int) -> ir.Value:
        """`width` bytes from the one at `index` on."""
        raw = self.builder.load(self._pointer(address, index, 1, ir.VectorType(I8, self.width)))
        raw.align = 1
        return raw

    def store_bytes(self, value: ir.Value, address: ir.Value, index: int) -> None:
        stored = self.builder.store(value, self._pointer(address, index, 1, value.type))
        stored.align = 1

    def store_number(self, value: ir.Value, address: ir.Value) -> None:
        """The first lane, as float32."""
        first = self.builder.extract_element(value, ir.Constant(I32, 0))
        stored = self.builder.store(first, self._pointer(address, 0, 4, F32))
        stored.align = 4

    def store_lanes(self, value: ir.Value, first: int, count: int, address: ir.Value, index: int) -> None:
        """`count` lanes from `first` on, as float32."""
        part = self._shuffled(value, value, list(range(first, first + count)))
        stored = self.builder.store(part, self._pointer(address, index, 4, part.type))
        stored.align = 4

    def rounded(self, value: ir.Value, elements: Elements) -> ir.Value:
        """What `load` would give after `store`."""
        if elements.name == "float32":
            return value
        narrow = self._narrowed(value, elements)
        if elements.name == "float16":
            return self.builder.fpext(narrow, self.vector)
        return self._widened(narrow)

    def load_number(self, address: ir.Value, index: ir.Value | int) -> ir.Value:
        """One float32, in all lanes."""
        return self.splat(self.builder.load(self._pointer(address, index, 4, F32)))

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fadd(a, b)

    def subtract(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fsub(a, b)

    def multiply(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fmul(a, b)

    def divide(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fdiv(a, b)

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once."""
        return self._called("llvm.fma", a, b, c)

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Of each lane; `b` where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Of each lane; `b` where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def negative(self, a: ir.Value) -> ir.Value:
        return self.builder.fneg(a)

    def absolute(self, a: ir.Value) -> ir.Value:
        return self._called("llvm.fabs", a)

    def dot(self, left: Sequence[ir.Value], right: Sequence[ir.Value]) -> ir.Value:
        """Lane by lane, the sum of the products of both lists' vectors."""
        total = self.multiply(left[0], right[0])
        for a, b in zip(left[1:], right[1:], strict=True):
            total = self.multiply_add(a, b, total)
        return total

    def load_pairs(self, address: ir.Value) -> ir.Value:
        """Two bfloat16 for each lane, side by side; the address is a multiple of their size."""
        kind = ir.VectorType(BFloat(), 2 * self.width)
        loaded = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        loaded.align = 4 * self.width
        return loaded

    def store_pairs(self, value: ir.Value, address: ir.Value) -> None:
        """What `load_pairs` loads."""
        stored = self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()))
        stored.align = 4 * self.width

    def load_pair(self, address: ir.Value) -> ir.Value:
        """The same two bfloat16 for all lanes."""
        pair = self.builder.load(self.builder.inttoptr(address, I32.as_pointer()))
        pair.align = 2
        undefined = ir.Constant(ir.VectorType(I32, self.width), ir.Undefined)
        first = self.builder.insert_element(undefined, pair, ir.Constant(I32, 0))
        alike = self._shuffled(first, first, [0] * self.width)
        return self.builder.bitcast(alike, ir.VectorType(BFloat(), 2 * self.width))

    def add_products_of_pairs(self, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """total + a[0] * b[0] + a[1] * b[1] in each lane, by the instruction of AVX-512 BF16; 16 lanes."""
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", self.vector, total, a, b)

    def square_root(self, a: ir.Value) -> ir.Value:
        return self._called("llvm.sqrt", a)

    def exp(self, x: ir.Value) -> ir.Value:
        """e**x for x of at most some 80; 0, or nearly, far below zero; not a number where x is none."""
        power = self.larger(self.splat(LEAST_EXPONENT), self.multiply(x, self.splat(LOG2_E)))
        # So large a number has no room for a fraction, and its last bits are the whole part.
        shifted = self.add(power, self.splat(ROUNDER))
        rest = self.subtract(power, self.subtract(shifted, self.splat(ROUNDER)))
        *lower, result = (self.splat(term) for term in EXP2_TERMS)
        for term in reversed(lower):
            result = self.multiply_add(result, rest, term)
        integers = ir.VectorType(I32, self.width)
        bias, shift = (ir.Constant(integers, [bits] * self.width) for bits in (EXPONENT_BIAS, MANTISSA_BITS))
        exponent = self.builder.add(self.builder.bitcast(shifted, integers), bias)
        return self.multiply(result, self.builder.bitcast(self.builder.shl(exponent, shift), self.vector))

    def tanh(self, x: ir.Value) -> ir.Value:
        """Off by at most some 2e-7; not a number where x is none."""
        power = self.exp(self.smaller(self.splat(80.0), self.add(x, x)))
        return self.subtract(self.splat(1.0), self.divide(self.splat(2.0), self.add(power, self.splat(1.0))))

    def sum_of_lanes(self, value: ir.Value) -> ir.Value:
        """In all lanes."""
        kind = ir.FunctionType(F32, [F32, self.vector])
        function = self._declared(f"llvm.vector.reduce.fadd.v{self.width}f32", kind)
        return self.splat(self.builder.call(function, [ir.Constant(F32, 0.0), value], fastmath=REASSOCIATE))

    def largest_lane(self, value: ir.Value) -> ir.Value:
        """In all lanes."""
        kind = ir.FunctionType(F32, [self.vector])
        function = self._declared(f"llvm.vector.reduce.fmax.v{self.width}f32", kind)
        return self.splat(self.builder.call(function, [value], fastmath=("nnan", "nsz")))

    def sums_by_lane(self, values: Sequence[ir.Value]) -> ir.Value:
        """Of `width` vectors, the sum of each one's lanes, in the lane of its index."""
        even, odd = (list(range(start, 2 * self.width, 2)) for start in (0, 1))
        while len(values) > 1:
            values = [
                self.add(self._shuffled(a, b, even), self._shuffled(a, b, odd))
                for a, b in zip(values[::2], values[1::2], strict=True)
            ]
        return values[0]

    def masked(self, value: ir.Value, count: ir.Value, otherwise: float) -> ir.Value:
        """The first `count` lanes; the others hold `otherwise`."""
        return self.builder.select(self._is_among_first(count), value, self.splat(otherwise))

    def masked_first(self, value: ir.Value, count: ir.Value, otherwise: float) -> ir.Value:
        """All but the first `count` lanes; those hold `otherwise`."""
        return self.builder.select(self._is_among_first(count), self.splat(otherwise), value)

    def call(self, name: str, result: ir.Type, *operands: ir.Value) -> ir.Value:
        """LLVM's function of that name, such as one that stands for an instruction."""
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.builder.call(self._declared(name, kind), operands)

    # Below: how LLVM is told.

    def _is_among_first(self, count: ir.Value) -> ir.Value:
        integers = ir.VectorType(I64, self.width)
        lanes = ir.Constant(integers, list(range(self.width)))
        first = self.builder.insert_element(ir.Constant(integers, ir.Undefined), count, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, self.width), [0] * self.width)
        return self.builder.icmp_signed("<", lanes, self.builder.shuffle_vector(first, first, mask))

    def _stored(self, elements: Elements) -> ir.Type:
        scalar = {"float32": F32, "float16": ir.HalfType(), "bfloat16": I16}[elements.name]
        return ir.VectorType(scalar, self.width)

    def _widened(self, bits: ir.Value) -> ir.Value:
        """bfloat16 is the upper half of float32."""
        wide = self.builder.zext(bits, ir.VectorType(I32, self.width))
        shift = ir.Constant(wide.type, [16] * self.width)
        return self.builder.bitcast(self.builder.shl(wide, shift), self.vector)

    def _narrowed(self, value: ir.Value, elements: Elements) -> ir.Value:
        if elements.name == "float32":
            return value
        if elements.name == "float16":
            return self.builder.fptrunc(value, self._stored(elements))
        if elements.rounds_in_hardware:
            narrow = self.builder.fptrunc(value, ir.VectorType(BFloat(), self.width))
            return self.builder.bitcast(narrow, self._stored(elements))
        # What is no number stays none: all that come here have zeros where rounding would carry from.
        wide = ir.VectorType(I32, self.width)
        half, one, shift = (ir.Constant(wide, [bits] * self.width) for bits in (0x7FFF, 1, 16))
        bits = self.builder.bitcast(value, wide)
        is_odd = self.builder.and_(self.builder.lshr(bits, shift), one)
        shifted = self.builder.lshr(self.builder.add(self.builder.add(bits, half), is_odd), shift)
        return self.builder.trunc(shifted, self._stored(elements))

    def _pointer(
        self, address: ir.Value, index: ir.Value | int, num_bytes: int, pointed: ir.Type
    ) -> ir.Value:
        place = self.integer(index) if isinstance(index, int) else index
        return self.builder.inttoptr(self.offset(address, (place, num_bytes)), pointed.as_pointer())

    def _shuffled(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def _called(self, name: str, *operands: ir.Value) -> ir.Value:
        return self.call(f"{name}.v{self.width}f32", self.vector, *operands)

    def _declared(self, name: str, kind: ir.FunctionType) -> ir.Function:
        known = self.module.globals.get(name)
        return known if known is not None else ir.Function(self.module, kind, name)


class Variable:
    """A changing value of a kernel."""

    __slots__ = ("_emitter", "_place")

    def __init__(self, emitter: Emitter, place: ir.Value) -> None:
        self._emitter = emitter
        self._place = place

    def get(self) -> ir.Value:
        return self._emitter.builder.load(self._place)

    def set(self, value: ir.Value) -> None:
        self._emitter.builder.store(value, self._place)
