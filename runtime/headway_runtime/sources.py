"""Where a model's files lie: turns the source a user wrote into a folder on this machine.

Knows the schemes and nothing of what is inside the files. Imports no torch: the HTTP process resolves too.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from headway_runtime.errors import ConfigError

SUPPORTED = "bundled://NAME, file:///FOLDER or the path of a folder"
BUNDLED_FOLDER = Path(__file__).parent / "bundled"


def resolve(source: str) -> Path:
    """The folder of `source`, which holds at least a config.json. ConfigError if there is none."""
    scheme, separator, rest = source.partition("://")
    if not separator:
        folder = Path(source).expanduser()
    elif scheme == "bundled":
        folder = _bundled(rest)
    elif scheme == "file":
        folder = _local(source)
    else:
        raise ConfigError(f"model source {source!r}: scheme {scheme!r} is not supported; use {SUPPORTED}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model source {source!r}: there is no config.json in {str(folder)!r}; "
            "give the folder of a model in Hugging Face layout"
        )
    return folder.absolute()


def bundled_names() -> list[str]:
    """Names of the models that come with this package, in order."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))


def _bundled(name: str) -> Path:
    if name not in bundled_names():
        known = ", ".join(repr(one) for one in bundled_names()) or "none"
        raise ConfigError(f"model source 'bundled://{name}': not bundled here; bundled models: {known}")
    return BUNDLED_FOLDER / name


def _local(source: str) -> Path:
    parts = urlsplit(source)
    if (
        parts.netloc not in ("", "localhost")
        or not parts.path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(f"model source {source!r}: a file source is written file:///absolute/folder")
    return Path(unquote(parts.path))
