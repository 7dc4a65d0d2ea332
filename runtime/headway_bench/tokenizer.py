"""Reads a tokenizer from a folder, for prompts of exact lengths; nothing else of the benchmark needs one."""

from pathlib import Path

from tokenizers import Tokenizer

from headway_bench.errors import InputFileError


class LocalTokenizer:
    """A model's `tokenizer.json`; special tokens are never added."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise InputFileError(f"--tokenizer {str(path)!r} cannot be read: {error}") from error

    def count(self, text: str) -> int:
        """How many tokens a text is."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def plain_ids(self) -> list[int]:
        """Every id that is no added or special token."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [number for number in range(self._tokenizer.get_vocab_size()) if number not in added]

    def decoded_vocabulary(self) -> list[str]:
        """Each plain token as text."""
        return [self._tokenizer.decode([number]) for number in self.plain_ids()]
