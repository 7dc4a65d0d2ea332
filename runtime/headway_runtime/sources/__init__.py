"""Where a model's files lie: turns the source a user wrote into a folder on this machine.

Knows the schemes and nothing of what is inside the files. What is here, or in the cache for good, is found
with the standard library alone; else a process of its own fetches (`fetching`). Imports no torch and no
library that speaks to a network: the HTTP process resolves too.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from headway_runtime.errors import ConfigError
from headway_runtime.sources.reference import (
    BucketModel,
    BundledModel,
    CachedModel,
    ClaimModel,
    FolderModel,
    HubModel,
    RegistryModel,
    RemoteModel,
    parse,
)

BUNDLED_FOLDER = Path(__file__).parent.parent / "bundled"
# Uses what is cached and asks nobody; the Hub's own variables do so for hf:// alone.
ADAPTER_CONFIG_FILE = "adapter_config.json"
OFFLINE_VARIABLE = "HEADWAY_OFFLINE"
HUB_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE_VALUES = ("1", "ON", "YES", "TRUE")


def resolve(
    source: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    lifeline_fd: int | None = None,
    headers_only: bool = False,
    on_progress: Callable[[int, int], None] = lambda there, wanted: None,
) -> Path:
    """The folder of `source`, which holds at least a config.json; fetched where it has to be.

    revision, download_dir: the flags of these names. lifeline_fd: a pipe at whose end nobody waits for it any
    more. headers_only: of a remote model's weights, only the headers have to be there.
    on_progress: hears, while something is fetched, of the bytes that are there and of all that are wanted.
    ConfigError for a source that names none, ModelFetchError for one that cannot be had, ModelLoadError for a
    model that this engine does not have.
    """
    reference = parse(source, revision)
    match reference:
        case BundledModel():
            return _checked(source, _bundled(reference.name))
        case FolderModel():
            return _checked(source, reference.path)
        case ClaimModel():
            raise ConfigError(
                f"model source {source!r}: a PersistentVolumeClaim can be read by pods alone; write it as "
                "spec.model.source of an InferenceService, whose pods mount it, or give the "
                "folder where this machine has the volume"
            )
        case CachedModel():
            raise ConfigError(
                f"model source {source!r}: a ModelCache can be read by pods alone; write it as "
                "spec.model.source of an InferenceService, or give the source that the ModelCache has"
            )
        case HubModel() | BucketModel() | RegistryModel():
            return _remote(
                source,
                reference,
                revision,
                download_dir,
                lifeline_fd,
                headers_only=headers_only,
                on_progress=on_progress,
            )


def resolve_adapter(
    source: str,
    *,
    download_dir: str | None = None,
    lifeline_fd: int | None = None,
    on_progress: Callable[[int, int], None] = lambda there, wanted: None,
) -> Path:
    """The folder of a LoRA adapter, likewise; a revision is written into the source."""
    reference = parse(source)
    match reference:
        case BundledModel():
            raise ConfigError(
                f"adapter source {source!r}: no adapters are bundled; give a folder or a remote one"
            )
        case FolderModel():
            if not (reference.path / ADAPTER_CONFIG_FILE).is_file():
                raise ConfigError(
                    f"adapter source {source!r}: no {ADAPTER_CONFIG_FILE} is in {str(reference.path)!r}; "
                    "give the folder of a LoRA adapter as PEFT saves it"
                )
            return reference.path.absolute()
        case ClaimModel():
            raise ConfigError(
                f"adapter source {source!r}: a PersistentVolumeClaim can be read by pods alone; write it "
                "into spec.lora.adapters of an InferenceService, whose pods mount it, or give the "
                "folder where this machine has the volume"
            )
        case CachedModel():
            raise ConfigError(
                f"adapter source {source!r}: a ModelCache can be read by pods alone; write it into "
                "spec.lora.adapters of an InferenceService, or give the source that the ModelCache has"
            )
        case HubModel() | BucketModel() | RegistryModel():
            return _remote(
                source,
                reference,
                None,
                download_dir,
                lifeline_fd,
                is_adapter=True,
                on_progress=on_progress,
            )


def bundled_names() -> list[str]:
    """Names of the models that come with this package, in order."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))


def is_offline(reference: RemoteModel, environment: Mapping[str, str]) -> bool:
    """Whether the user wants nobody to be asked for it."""
    names = (OFFLINE_VARIABLE, *(HUB_OFFLINE_VARIABLES if isinstance(reference, HubModel) else ()))
    return any(environment.get(name, "").upper() in TRUE_VALUES for name in names)


def _remote(
    source: str,
    reference: RemoteModel,
    revision: str | None,
    download_dir: str | None,
    lifeline_fd: int | None,
    *,
    is_adapter: bool = False,
    headers_only: bool = False,
    on_progress: Callable[[int, int], None] = lambda there, wanted: None,
) -> Path:
    # Only now: a folder of this machine needs none of it.
    from headway_runtime.sources.cache_folders import store_of
    from headway_runtime.sources.fetch_task import Task
    from headway_runtime.sources.fetching import fetch_apart
    from headway_runtime.sources.wanted import ADAPTER, MODEL

    store = store_of(reference, download_dir, os.environ, ADAPTER if is_adapter else MODEL)
    offline = is_offline(reference, os.environ)
    identity = reference.pinned or (store.known(reference.ref) if offline else None)
    if identity is not None and (folder := store.complete(identity, or_adopted=offline)) is not None:
        return folder
    task = Task(source, revision, download_dir, offline, lifeline_fd, is_adapter, headers_only)
    return fetch_apart(task, on_progress)


def _checked(source: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        is_missing = isinstance(parse(source), FolderModel) and not folder.exists()
        meant = (
            f", or hf://{source} if that is a repository of the Hugging Face Hub"
            if _is_like_hub(source)
            else ""
        )
        raise ConfigError(
            f"model source {source!r}: there is no config.json in {str(folder)!r}; "
            f"give the folder of a model in Hugging Face layout{meant if is_missing else ''}"
        )
    return folder.absolute()


def _is_like_hub(source: str) -> bool:
    """Whether it would be a repository with hf:// before it, as other servers take it."""
    try:
        return "://" not in source and isinstance(parse(f"hf://{source}"), HubModel)
    except ConfigError:
        return False


def _bundled(name: str) -> Path:
    if name not in bundled_names():
        known = ", ".join(repr(one) for one in bundled_names()) or "none"
        raise ConfigError(f"model source 'bundled://{name}': not bundled here; bundled models: {known}")
    return BUNDLED_FOLDER / name
