"""Reads a file of YAML documents as `kubectl --validate=strict` does: a key that stands twice is refused.

PyYAML takes the last one without a word: of `device: cpu` and `device: cuda` nobody knows which holds.
"""

from pathlib import Path
from typing import Any

import yaml

from headway_operator.errors import SpecError


def read_documents(path: Path) -> list[Any]:
    """The documents that are not empty. SpecError, its `field` being the file, for what is no such file."""
    try:
        # Opened, so that what is wrong in it is told with its name.
        with path.open("rb") as file:
            return [document for document in yaml.load_all(file, _Loader) if document is not None]
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from error
    except _TwiceError as error:
        raise SpecError(str(path), str(error)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(str(path), f"is not YAML: {error}") from error


class _TwiceError(yaml.YAMLError):
    """A mapping has the same key more than once."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which looks at the keys of each mapping before it is made."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called of each mapping; what `<<` brings from elsewhere may be written over, as YAML has it."""
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node), key_node.start_mark.line + 1
            if key in lines:
                raise _TwiceError(
                    f"the key {key!r} stands twice in one place, on line {lines[key]} and on line {line}; "
                    "keep one of them"
                )
            lines[key] = line
        super().flatten_mapping(node)
