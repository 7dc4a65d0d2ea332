"""One replica or gateway as a child process: start, watch, restart with back-off, drain and stop.

The life of a child, in the order in which `run` goes through it:

1. start: spawn `COMMAND --port-file F --lifeline-fd N` in its own session, its output appended to a log file;
2. starting: wait for the port file, then ask `/ready` until it says yes or the start-up time is over;
3. ready: keep asking `/ready` and `/health`; a child that fails `/health` too often is killed;
4. exit: unless asked to stop, say why it ended (with its last line), wait 1, 2, 4 ... 30 s, go to 1;
5. stop: say draining, let the gateway see it, SIGTERM, wait out the grace, SIGKILL its process group.

It knows one process; which processes there should be is `local`'s business.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp

from headway_operator.cluster.local_exit import count_oom_kills, explain_exit, log_tail
from headway_operator.cluster.local_fetch import fetch_words
from headway_operator.cluster.local_probe import probe
from headway_operator.cluster.local_template import ProcessTemplate, for_process
from headway_operator.state import Replica, ReplicaPhase, Start

STARTING_POLL_SECONDS = 0.1
MAX_READY_POLL_SECONDS = 1.0
MIN_PROBE_TIMEOUT_SECONDS = 5.0  # a laptop under load answers late; that alone is no reason to leave it out
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0  # after this long in service the next crash starts from the first back-off again
DRAIN_NOTICE_SECONDS = 0.3  # the gateway reads its table every 0.1 s


def _make_folders(folders: tuple[str, ...]) -> None:
    for folder in folders:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)


class LocalProcess:
    """Supervises one child, the `number`th of its Deployment.

    `snapshot` tells its state; `on_change` is called whenever that changes.
    """

    def __init__(
        self,
        *,
        name: str,
        number: int,
        revision: str,
        template: ProcessTemplate,
        folder_of_ports: Path,
        folder_of_logs: Path,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.number = number
        self.revision = revision
        self.template = for_process(template, name)
        self.deletion_cost = 0
        self.phase: ReplicaPhase = "pending"
        self.port: int | None = None
        self.pid: int | None = None
        self.created_at = clock()
        self.ready_at: float | None = None
        self.num_restarts = 0
        self.is_held_up = False  # by a source that does not give what is fetched
        self.log_path = folder_of_logs / f"{name}.log"
        self._reason = ""
        self._message = ""
        self._port_path = folder_of_ports / f"{name}.port"
        self._lifeline = -1
        self._session = session
        self._clock = clock
        self._on_change = on_change
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._oom_kills_at_start = 0
        self._log_offset = 0

    @property
    def address(self) -> str | None:
        """Base URL once the port is known."""
        return None if self.port is None else f"http://127.0.0.1:{self.port}"

    def snapshot(self) -> Replica:
        """The process as a replica of the service."""
        return Replica(
            name=self.name,
            revision=self.revision,
            phase=self.phase,
            address=self.address,
            created_at=self.created_at,
            ready_at=self.ready_at,
            reason=self._reason,
            message=self._message,
            num_restarts=self.num_restarts,
            deletion_cost=self.deletion_cost,
            start=self._start_seconds(),
        )

    def _start_seconds(self) -> Start | None:
        """Of the first start: a process has its node and its files from the beginning."""
        if self.ready_at is None or self.num_restarts:
            return None
        return Start(0.0, 0.0, 0.0, max(0.0, self.ready_at - self.created_at))

    def stop(self, *, at_once: bool = False) -> None:
        """Ask it to drain and end; `at_once` kills instead. `run` returns when the process is gone."""
        self._stop.set()
        if at_once:
            self._force.set()

    async def run(self) -> None:
        """Keep the process running until `stop`. Cancelling kills it. Its own folders go with it."""
        try:
            await self._keep_running()
        finally:
            for folder in self.template.own_folders:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _keep_running(self) -> None:
        while not self._stop.is_set():
            try:
                process = await self._start()
            except OSError as error:
                self._set(
                    "failed", "CreateContainerError", f"cannot run {self.template.command[0]!r}: {error}"
                )
            else:
                try:
                    killed_for = await self._watch(process)
                    if self._stop.is_set():
                        await self._drain(process)
                        return
                    oom_kills = count_oom_kills() - self._oom_kills_at_start
                    cause = explain_exit(process.returncode, killed_for, oom_kills, self.tail(1))
                    self._set("failed", *cause)
                finally:
                    if process.returncode is None:
                        kill_group(process)
                        await process.wait()
                    self.port = self.pid = None
                    self._port_path.unlink(missing_ok=True)
                    self._cut_lifeline()
            await self._back_off()

    async def _start(self) -> asyncio.subprocess.Process:
        self._port_path.unlink(missing_ok=True)
        _make_folders(self.template.own_folders)
        # The child holds the read end: it reaches its end when this process is gone, however it ended. Each
        # child has a pipe of its own: flags that one sets on a shared one (O_NONBLOCK) are set for them all.
        read_end, self._lifeline = os.pipe()
        command = (
            *self.template.command,
            *("--port-file", str(self._port_path), "--lifeline-fd", str(read_end)),
        )
        try:
            with self.log_path.open("ab") as log:
                self._log_offset = log.tell()
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.template.environment},
                    pass_fds=(read_end,),
                    start_new_session=True,  # Ctrl-C reaches the parent only, which then drains its children
                )
        except BaseException:
            self._cut_lifeline()
            raise
        finally:
            os.close(read_end)
        self.pid = process.pid
        self._oom_kills_at_start = count_oom_kills()
        self._set("starting", self._reason, self._message)
        return process

    def _cut_lifeline(self) -> None:
        os.close(self._lifeline)
        self._lifeline = -1

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Follow a running process until it exits or is asked to stop. Returns why it was killed, or ""."""
        exited = asyncio.create_task(process.wait())
        probing = asyncio.create_task(self._probe_forever())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({exited, probing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if probing.done() and not exited.done() and not stopping.done():
                kill_group(process)
                await exited
                return probing.result()
            return ""
        finally:
            for task in (exited, probing, stopping):
                task.cancel()
            await asyncio.gather(exited, probing, stopping, return_exceptions=True)

    async def _probe_forever(self) -> str:
        """Move between starting and ready as the probes say. Returns only to have the process killed: why."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.template.startup_seconds
        while not await self._is_ready():
            if loop.time() > deadline:
                return f"not ready within {self.template.startup_seconds:g} s"
            await asyncio.sleep(STARTING_POLL_SECONDS)
        return await self._stay_ready()

    async def _stay_ready(self) -> str:
        loop = asyncio.get_running_loop()
        ready, live = self.template.ready, self.template.live
        num_unready = num_dead = 0
        next_live = loop.time() + (live.period_seconds if live else 0)
        while True:
            await asyncio.sleep(min(ready.period_seconds, MAX_READY_POLL_SECONDS))
            is_last_chance = num_unready + 1 >= ready.failure_threshold
            num_unready = 0 if await self._is_ready(tolerate=not is_last_chance) else num_unready + 1
            if live and loop.time() >= next_live:
                next_live = loop.time() + live.period_seconds
                timeout = max(live.timeout_seconds, MIN_PROBE_TIMEOUT_SECONDS)
                failure = await probe(self._session, f"{self.address}{live.path}", timeout)
                num_dead = num_dead + 1 if failure else 0
                if num_dead >= live.failure_threshold:
                    return f"{live.path} failed {num_dead} times in a row: {failure}"

    async def _is_ready(self, *, tolerate: bool = False) -> bool:
        """Ask once. tolerate: a ready process that fails this time stays ready."""
        if self.port is None:
            self.port = self._read_port()
        if self.port is None:
            words, self.is_held_up = fetch_words(self.tail())
            if not self._reason:  # why it crashed before says more
                self._set("starting", "", words)
            return False
        self.is_held_up = False
        timeout = max(self.template.ready.timeout_seconds, MIN_PROBE_TIMEOUT_SECONDS)
        failure = await probe(self._session, f"{self.address}{self.template.ready.path}", timeout)
        if failure is None:
            if self.ready_at is None:
                self.ready_at = self._clock()
            self._set("ready", "", "")
            return True
        if not tolerate:
            self.ready_at = None
            if self.phase == "ready":
                self._set("starting", "ReadinessProbeFailed", failure)
            elif self._reason in ("", "ReadinessProbeFailed"):  # why it crashed before says more
                self._set("starting", self._reason, failure)
        return False

    def _read_port(self) -> int | None:
        try:
            return int(self._port_path.read_text())
        except (FileNotFoundError, ValueError):
            return None

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        was_ready = self.phase == "ready"
        self._set("draining", "", "")
        if was_ready and process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._force.wait(), DRAIN_NOTICE_SECONDS)
        if process.returncode is None and not self._force.is_set():
            process.terminate()
        exited = asyncio.create_task(process.wait())
        forced = asyncio.create_task(self._force.wait())
        try:
            await asyncio.wait(
                {exited, forced},
                timeout=self.template.grace_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            forced.cancel()
            if process.returncode is None:
                kill_group(process)
            await exited

    async def _back_off(self) -> None:
        if self.ready_at is not None and self._clock() - self.ready_at >= STEADY_SECONDS:
            self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self.ready_at = None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), self._backoff_seconds)
        self._backoff_seconds = min(self._backoff_seconds * 2, MAX_BACKOFF_SECONDS)
        self.num_restarts += 1

    def tail(self, num_lines: int = 20) -> str:
        """The last lines that are not blank, of what it has written since its latest start."""
        return log_tail(self.log_path, self._log_offset, num_lines)

    def _set(self, phase: ReplicaPhase, reason: str, message: str) -> None:
        if (phase, reason, message) != (self.phase, self._reason, self._message):
            self.phase, self._reason, self._message = phase, reason, message
            self._on_change()


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill the process and what it started; one that has gone is as good."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
