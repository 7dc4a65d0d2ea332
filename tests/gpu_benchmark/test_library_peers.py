"""What libraries are given is our own data in their layouts, and what cannot run is told, not raised.

The libraries are not here: what stands for them does what their documentation says, by torch.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from benchmarks.gpu import library_peers
from benchmarks.gpu.cases.case import error_of, generator_on
from benchmarks.gpu.costs import model_shape
from benchmarks.gpu.library_peers import Comparison, attention_pair, comparisons, product_pair
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import LLAMA_8B, TINY
from torch import Tensor

MODEL = model_shape(TINY)


class PagedWrapper:
    """FlashInfer's, for pages in its layout "HND" [pages, 2, heads, tokens, numbers]."""

    is_decode = False

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "HND"

    def plan(self, *arguments: Any, causal: bool = False, **types: Any) -> None:
        if self.is_decode:
            arguments = (torch.arange(len(arguments[0]), dtype=torch.int32), *arguments)
        else:
            assert causal
        self._rows, self._starts, self._pages, self._last, *self._shape = arguments
        for one in (self._rows, self._starts, self._pages, self._last):
            assert one.dtype == torch.int32

    def run(self, query: Tensor, cache: Tensor) -> Tensor:
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        assert cache.shape[1:] == (2, num_kv_heads, page_size, head_dim)
        found = []
        for index in range(len(self._rows) - 1):
            own = self._pages[self._starts[index] : self._starts[index + 1]].long()
            length = (len(own) - 1) * page_size + int(self._last[index])
            keys, values = (cache[own, kind].transpose(0, 1).flatten(1, 2)[:, :length] for kind in range(2))
            rows = query[self._rows[index] : self._rows[index + 1]].transpose(0, 1)
            mask = torch.ones(rows.shape[1], length, dtype=torch.bool).tril(length - rows.shape[1])
            attended = functional.scaled_dot_product_attention(
                rows.float()[None],
                keys.float()[None],
                values.float()[None],
                mask,
                enable_gqa=num_heads != num_kv_heads,
            )
            found.append(attended[0].transpose(0, 1).to(query.dtype))
        return torch.cat(found)


class DecodeWrapper(PagedWrapper):
    is_decode = True


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper, BatchPrefillWithPagedKVCacheWrapper=PagedWrapper
)


class Linear:
    """GemLite's."""

    def __init__(self, bits: int, *, group_size: int, in_features: int, out_features: int, **types: Any):
        assert bits == 4
        self._group_size, self._shape = group_size, (out_features, in_features)

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor, bias: None) -> None:
        grouped = codes.reshape(-1, self._group_size).float()
        self._weight = ((grouped - zeros.float()) * scales.float()).view(self._shape)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self._weight).to(x.dtype)


GEMLITE = SimpleNamespace(GemLiteLinear=Linear, TORCH_TO_DTYPE={torch.bfloat16: "bfloat16"})


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(1, 40), (1, 16), (1, 1)], id="decodes"),
        pytest.param([(33, 33)], id="a prompt"),
        pytest.param([(5, 20), (18, 18)], id="chunks"),
    ],
)
def test_flashinfer_gets_our_blocks_where_they_lie(lengths: list[tuple[int, int]]) -> None:
    pair = attention_pair(FLASHINFER, generator_on("cpu", 7), model=MODEL, lengths=lengths)

    assert error_of(pair.theirs(), pair.exact()) < library_peers.TOLERANCE


@pytest.mark.parametrize("rows", [1, 5])
def test_gemlite_gets_a_weight_of_that_size(rows: int) -> None:
    pair = product_pair(GEMLITE, generator_on("cpu", 8), rows=rows, shape=(64, 256))

    assert error_of(pair.theirs(), pair.exact()) < library_peers.TOLERANCE


def test_comparisons_are_of_the_goals_shapes() -> None:
    names = [one.name for one in comparisons(model_shape(LLAMA_8B))]

    assert names == [
        "flashinfer, decode attention, 32 at 8192",
        "flashinfer, prefill attention, 8192 of 8192",
        "gemlite, int4 product, 1 x 28672 x 4096",
        "gemlite, int4 product, 32 x 28672 x 4096",
    ]


def test_libraries_that_are_not_there_are_left_out_with_a_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = Report(tmp_path / "out.json", {}, 500.0)
    library_peers.run_library_peers(report, "cpu")

    assert report.rows == []
    assert capsys.readouterr().out.splitlines() == [
        "peers | flashinfer | left out: it is not installed",
        "peers | gemlite | left out: it is not installed",
    ]


def test_what_a_library_cannot_do_is_in_its_row_and_no_fault(tmp_path: Any) -> None:
    def fail(module: Any, generator: Any) -> Any:
        raise OSError("no nvcc")

    cost = comparisons(model_shape(LLAMA_8B))[0].cost
    row = library_peers._measured(Comparison("json", "a library", cost, fail), "cpu")

    assert row == {"failed": "OSError: no nvcc"}
