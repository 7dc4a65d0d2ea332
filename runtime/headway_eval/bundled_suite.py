"""Text and tasks that come with Headway, and which models they are for.

`bundled_model.suites` writes them, out of what the bundled models were never trained on.
"""

from functools import cache
from pathlib import Path

from headway_runtime.sources import BUNDLED_FOLDER
from headway_runtime.tokenizer import read_json_file

FOLDER = Path(__file__).parent / "suites"
TEXT_PATH = FOLDER / "bundled_text.jsonl"
TASKS_PATH = FOLDER / "bundled_tasks.jsonl"
REFERENCE = BUNDLED_FOLDER / "headway-tiny"


@cache
def fits(folder: Path) -> bool:
    """Whether a model reads them as the bundled ones do: the same tokenizer, and the same chat template."""
    try:
        same_tokenizer = _tokenizer(folder) == _tokenizer(REFERENCE)
    except OSError:
        return False
    return same_tokenizer and _chat_template(folder) == _chat_template(REFERENCE)


def _tokenizer(folder: Path) -> bytes:
    return (folder / "tokenizer.json").read_bytes()


def _chat_template(folder: Path) -> object:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return read_json_file(folder / "tokenizer_config.json").get("chat_template")
