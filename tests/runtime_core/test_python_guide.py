"""Every example of docs/python.md runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway_runtime.engine_options import keyword_options
from headway_runtime.generation_output import CompletionOutput, GenerationOutput, Timings
from headway_runtime.sampling_params import SamplingParams
from headway_runtime.sources import resolve

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_guide_names_what_there_is() -> None:
    for kind in (GenerationOutput, CompletionOutput, Timings):
        for field in kind.__dataclass_fields__:
            assert f"`{field}`" in GUIDE or field in ("request_id", "finished", "index"), field
    for field in SamplingParams.__dataclass_fields__:
        assert f"`{field}`" in GUIDE or field.endswith("_penalty"), field
    for keyword in ("max_model_len", "kv_cache_memory_bytes", "enable_prefix_caching"):
        assert keyword in GUIDE
        keyword_options(resolve("bundled://headway-tiny"), {keyword: None})
