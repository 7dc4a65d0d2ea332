"""Each peer's own environment, made by uv once under a cache folder outside the checkout.

The requirement files hold complete sets of pinned versions and are installed without resolving anything
(`--no-deps`): vLLM's leaves out torchvision, torchaudio and torchcodec, which it names but does not need.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
INSTALL_TIMEOUT_SECONDS = 3600.0
PYTHON_VERSION = "3.11"
# llama.cpp comes as source; its processor is the one it is built on.
PEERS = ("vllm", "transformers", "llama.cpp")


class InstallError(Exception):
    """A peer could not be installed; the message is the end of what uv said."""


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "headway" / "bench-cpu"


def be_as_the_engine(module: str) -> None:
    """Run `module` with the environment that a server gives its engine process, unless this one has it.

    Libraries read it when they load, so it has to be there from the start: then this does not return.
    """
    from headway_runtime.server.engine_handle import engine_environment

    wanted = engine_environment(os.environ, len(os.sched_getaffinity(0)))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], wanted)


def peer_python(peer: str) -> Path:
    """The interpreter of a peer's environment, installed now unless it is complete already."""
    requirements = HERE / "requirements" / f"{peer}.txt"
    folder = cache_folder() / peer
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return python
    print(f"installing {peer} into {folder}; this takes minutes, once", flush=True)
    uv = _find_uv()
    _run([uv, "venv", "--quiet", "--allow-existing", "--python", PYTHON_VERSION, str(folder)])
    _run([uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), "-r", str(requirements)])
    stamp.write_text(wanted)
    return python


def _find_uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise InstallError("uv is not installed; run `make install`")
    return found


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS)
    except subprocess.CalledProcessError as error:
        raise InstallError(f"{' '.join(command[:3])} failed: {error.stderr[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{' '.join(command[:3])} took more than {INSTALL_TIMEOUT_SECONDS} s") from error
