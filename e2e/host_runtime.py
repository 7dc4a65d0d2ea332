"""Lets the replicas of a service run this machine's Python environment instead of an image with torch in it.

The image of the runtime is about 5 GB, too much to build and import in every run. On a cluster whose one node
is this machine, the service's own pod template mounts the interpreter, its packages and this checkout from
the host: the runtime is the one under test, its flags, probes and limits are those the operator rendered.
"""

import copy
import sys
import sysconfig
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
MOUNTS = Path("/host")


def with_host_runtime(manifest: dict[str, Any]) -> dict[str, Any]:
    """The same InferenceService with a pod template that brings the runtime from the host."""
    folders = {
        "python": Path(sys.base_prefix),
        "packages": Path(sysconfig.get_path("purelib")),
        # The packages are installed editable: what they point at lies in the checkout.
        "operator": CHECKOUT / "operator",
        "runtime": CHECKOUT / "runtime",
    }
    paths = {name: str(MOUNTS / name) for name in folders}
    # The interpreter was linked against the host's libraries, which may be newer than the image's.
    volumes = {"system": ("/usr", "/usr")} | {name: (str(folders[name]), paths[name]) for name in folders}
    container = {
        "name": "runtime",
        "command": [f"{paths['python']}/bin/python{sysconfig.get_python_version()}", "-m", "headway"],
        "env": [
            {"name": "PYTHONPATH", "value": f"{paths['operator']}:{paths['runtime']}:{paths['packages']}"},
            {"name": "LD_LIBRARY_PATH", "value": f"{paths['python']}/lib"},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ],
        "volumeMounts": [
            {"name": f"host-{name}", "mountPath": inside, "readOnly": True}
            for name, (_, inside) in volumes.items()
        ],
    }
    template = {
        "spec": {
            "containers": [container],
            "volumes": [
                {"name": f"host-{name}", "hostPath": {"path": outside, "type": "Directory"}}
                for name, (outside, _) in volumes.items()
            ],
        }
    }
    result = copy.deepcopy(manifest)
    result["spec"]["template"] = template
    return result
