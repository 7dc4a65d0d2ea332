"""Gives the volumes of a Deployment or Job their counterparts on this machine: a folder for each."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway_operator.cluster.local_workspace import write_atomically
from headway_operator.errors import ClusterError
from headway_operator.spec.quality import config_map_key
from headway_operator.state import ChildKey, Manifest

Secrets = Mapping[str, Mapping[str, bytes]]
ConfigMaps = Mapping[str, Mapping[str, str]]


def materialise(
    deployment: Manifest, children: Mapping[ChildKey, Manifest], secrets: Secrets, root: Path
) -> dict[str, Path]:
    """Volume name -> folder. ConfigMaps come from the children applied so far, Secrets from `secrets`.

    Raises ClusterError for a volume that has no counterpart here.
    """
    name = deployment["metadata"]["name"]
    folders = {}
    for volume in deployment["spec"]["template"]["spec"].get("volumes", ()):
        where = f"{deployment['kind']} {name!r}: volume {volume['name']!r}"
        folder = root / name / volume["name"]
        if "hostPath" in volume:
            folder = Path(volume["hostPath"]["path"])
        elif "emptyDir" in volume:
            # Where the path exists here, /tmp for one, the process uses that as any other process does.
            folder = next((path for path in mount_paths(deployment, volume["name"]) if path.is_dir()), folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif "configMap" in volume:
            source = volume["configMap"]
            child = children.get(ChildKey("ConfigMap", source["name"]))
            if child is None:
                raise ClusterError(
                    f"{where}: there is no ConfigMap {source['name']!r}; "
                    "put it into the same file as the InferenceService, as a document of its own"
                )
            _write(folder, {key: text.encode() for key, text in child.get("data", {}).items()}, source, where)
        elif "secret" in volume:
            source = volume["secret"]
            values = secrets.get(source["secretName"])
            if values is None:
                raise ClusterError(
                    f"{where}: there is no Secret {source['secretName']!r}; "
                    "put it into the same file as the InferenceService, as a second document"
                )
            _write(folder, values, source, where)
        else:
            kind = next(iter(volume.keys() - {"name"}), "nothing")
            if kind == "persistentVolumeClaim":
                claim = volume[kind].get("claimName")
                raise ClusterError(
                    f"{where} is the claim {claim!r}, which only a cluster has; give the folder where this "
                    "machine has its files, as spec.model.source or as a hostPath"
                )
            raise ClusterError(f"{where} is a {kind}, which has no counterpart in the local world")
        folders[volume["name"]] = folder
    return folders


def file_digest(name: str, config_maps: ConfigMaps) -> str | None:
    """Changes when a file that `spec.quality` names does; None where its ConfigMap does not have it.

    "" for what is no file of this machine under this path: a volume may have it.
    """
    if (place := config_map_key(name)) is not None:
        text = config_maps.get(place[0], {}).get(place[1])
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()
    try:
        found = Path(name).stat()
    except OSError:
        return ""
    return f"{found.st_size} bytes of {found.st_mtime_ns}"


def mount_paths(deployment: Manifest, volume: str) -> list[Path]:
    """Where the containers of `deployment` see the volume."""
    return [
        Path(mount["mountPath"])
        for container in deployment["spec"]["template"]["spec"]["containers"]
        for mount in container.get("volumeMounts", ())
        if mount["name"] == volume
    ]


def _write(folder: Path, values: Mapping[str, bytes], source: Mapping[str, Any], where: str) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = {item["key"]: item["path"] for item in source.get("items", ())} or {key: key for key in values}
    for key, path in paths.items():
        if key not in values:
            raise ClusterError(f"{where}: there is no key {key!r}; known are {', '.join(sorted(values))}")
        target = folder / path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Rewritten only when it says something new: whoever reads it looks at its time of change.
        if not target.exists() or target.read_bytes() != values[key]:
            write_atomically(target, values[key])
