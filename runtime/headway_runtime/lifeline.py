"""Ties this process's life to its parent's: when the parent is gone, however it went, so is this process.

Two ropes: a pipe whose write end only the parent holds (its end of file is the parent's death), and on
Linux the kernel's parent-death signal. Knows nothing of what the process does.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
EXIT_STATUS_ORPHANED = 1


def watch_lifeline(fd: int, before_exit: Callable[[], None] | None = None) -> None:
    """End this process at once, by `os._exit`, when the pipe that `fd` reads from reaches its end.

    `before_exit` runs first: kill children, remove files; what it raises is not waited for.
    """

    def watch() -> None:
        try:
            while _is_open(fd):
                pass
        except OSError:
            pass  # the descriptor is broken: as good as an end
        try:
            if before_exit is not None:
                before_exit()
        finally:
            _say_why()
            os._exit(EXIT_STATUS_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _say_why() -> None:
    # Straight to the descriptor, because a lock of the logging module may never be released again; and
    # perhaps nobody reads it any more.
    with contextlib.suppress(OSError):
        os.write(2, f"process {os.getpid()} ends: its parent is gone\n".encode())


def _is_open(fd: int) -> bool:
    """Wait until the pipe has something to say; False at its end.

    Waits apart from reading: another process that shares the pipe may have made it non-blocking.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    try:
        return bool(os.read(fd, 4096))
    except BlockingIOError:
        return True  # another reader was faster


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere the pipe alone holds)."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return  # forbidden by a seccomp profile: the pipe alone holds
    if os.getppid() != parent_pid:
        os._exit(EXIT_STATUS_ORPHANED)  # it died before the call
