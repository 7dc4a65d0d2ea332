"""Attention of decodes: one new token each of many sequences, against paged KV.

Does in one pass over the cache what takes PyTorch eight operators and a copy of all that is attended to:
rotates the new queries and keys, stores the new keys and values, and attends block by block. A second kernel
finds the first two done, and otherwise computes the very same. How they are made: see decode_writer.py.
"""

from functools import cache, partial

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.decode_writer import DecodeWriter
from headway_runtime.kernels.cpu.elements import Elements
from headway_runtime.kernels.cpu.kv_layout import KVLayout
from headway_runtime.kernels.cpu.scoring import Scoring

STORED_NAME = "stored_decode_attention"


class DecodeAttention:
    """The kernels for one layout and one way of scoring."""

    __slots__ = ("_kernel", "_layout", "_stored_text")

    def __init__(self, layout: KVLayout, scoring: Scoring, dtype: torch.dtype, width: int) -> None:
        """dtype: of queries, keys and values before they are stored."""
        self._layout = layout
        name = "decode_attention"
        self._kernel = Kernel(name, _text(name, layout, scoring, elements(dtype), width, is_stored=False))
        # Compiled when it is first needed, which is seldom.
        self._stored_text = partial(
            _text, STORED_NAME, layout, scoring, elements(dtype), width, is_stored=True
        )

    def __call__(
        self,
        qkv: Tensor,
        cosine: Tensor,
        sine: Tensor,
        blocks: Tensor,
        tables: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        """Rows of one token each; all others contiguous.

        qkv: [sequences, heads * head_dim], before rotation.
        cosine, sine: [sequences, head_dim], from `RotaryTable`.
        blocks: one layer's cache (see kv_layout.py), of which the first number is looked at for its address;
            written as well.
        tables: ids of each sequence's blocks, int64 [sequences, width]; positions: of the tokens, int64.
        out: [sequences, kv_heads * num_groups * head_dim].
        """
        assert cosine.is_contiguous()
        assert sine.is_contiguous()
        rotation = (cosine.data_ptr(), sine.data_ptr())
        self._run(self._kernel, qkv, rotation, blocks, tables, positions, out)

    def attend_stored(
        self, qkv: Tensor, blocks: Tensor, tables: Tensor, positions: Tensor, out: Tensor
    ) -> None:
        """The same after `RotateAndStore`. Rows may be one sequence's, with those before each stored too."""
        kernel = Kernel(STORED_NAME, self._stored_text())
        self._run(kernel, qkv, (0, 0), blocks, tables, positions, out)

    def _run(
        self,
        kernel: Kernel,
        qkv: Tensor,
        rotation: tuple[int, int],
        blocks: Tensor,
        tables: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        assert all(one.is_contiguous() for one in (qkv, positions, out))
        assert blocks.stride(0) * blocks.itemsize == self._layout.block_bytes
        assert tables.dtype == positions.dtype == torch.int64
        assert tables.stride(1) == 1
        num_sequences, num_threads = len(tables), torch.get_num_threads()
        num_kv_heads = num_heads = self._layout.shape.num_kv_heads
        # Neighbouring heads of a block are neighbours in memory, so one thread takes all that it can.
        while num_sequences * (num_kv_heads // num_heads) < 2 * num_threads and num_heads > 1:
            num_heads = num_heads // 2 if num_heads % 2 == 0 else 1
        kernel.run(
            num_threads,
            num_sequences,
            qkv.data_ptr(),
            *rotation,
            blocks.data_ptr(),
            num_heads,
            tables.data_ptr(),
            tables.stride(0),
            positions.data_ptr(),
            out.data_ptr(),
        )


@cache
def _text(
    name: str, layout: KVLayout, scoring: Scoring, stored: Elements, width: int, *, is_stored: bool
) -> str:
    return DecodeWriter(name, layout, scoring, stored, width, is_stored=is_stored).text()
