"""Jobs as child processes: started once, tried again as far as the Job says, ended when their time is over.

What a Job is told to leave in its termination log goes to a file, which is read when it has ended. Where the
exit status is one that the Job's podFailurePolicy calls final, that is the end; else the next attempt follows
after a pause. Knows nothing of what the Job does.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway_operator.cluster.local_exit import count_oom_kills, explain_exit, log_tail
from headway_operator.cluster.local_process import kill_group
from headway_operator.cluster.local_template import ProcessTemplate
from headway_operator.state import Evaluation, Manifest

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
MAX_OUTPUT_BYTES = 4096  # as a kubelet keeps


@dataclass(slots=True)
class _Run:
    evaluation: Evaluation
    task: asyncio.Task[None]


class LocalJobs:
    """The Jobs of a service. `on_change` is called whenever one gets on."""

    def __init__(self, folder_of_logs: Path, folder_of_results: Path, on_change: Callable[[], None]) -> None:
        self._logs = folder_of_logs
        self._results = folder_of_results
        self._on_change = on_change
        self._runs: dict[str, _Run] = {}

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Each Job as it is now."""
        return tuple(run.evaluation for run in self._runs.values())

    def start(self, manifest: Manifest, template: ProcessTemplate) -> None:
        """Run the Job; one that runs or has run under this name is left alone."""
        name = manifest["metadata"]["name"]
        if name in self._runs:
            return
        task = asyncio.create_task(self._run(name, manifest["spec"], template), name=name)
        self._runs[name] = _Run(Evaluation(name, "pending"), task)

    def remove(self, name: str) -> None:
        """Forget the Job; its process is killed if it still runs."""
        if run := self._runs.pop(name, None):
            run.task.cancel()

    async def close(self) -> None:
        """Kill what runs."""
        tasks = [run.task for run in self._runs.values()]
        self._runs.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: str, spec: Mapping[str, Any], template: ProcessTemplate) -> None:
        try:
            async with asyncio.timeout(spec.get("activeDeadlineSeconds")):
                message, output = await self._attempts(name, spec, template)
            self._set(Evaluation(name, "ended", message, output))
        except TimeoutError:
            self._set(Evaluation(name, "timed_out"))

    async def _attempts(
        self, name: str, spec: Mapping[str, Any], template: ProcessTemplate
    ) -> tuple[str, str]:
        final, pause = _final_statuses(spec), FIRST_PAUSE_SECONDS
        for attempt in range(int(spec.get("backoffLimit", 6)) + 1):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            status, message, output = await self._attempt(name, spec, template)
            if status in final:
                break
            self._set(Evaluation(name, "running", message))
        return message, output

    async def _attempt(
        self, name: str, spec: Mapping[str, Any], template: ProcessTemplate
    ) -> tuple[int, str, str]:
        """Exit status, how it ended in words, and what it left behind. Cancelling kills it."""
        result, log_path = self._results / name, self._logs / f"{name}.log"
        result.unlink(missing_ok=True)
        command = _with_result(template.command, spec, result)
        # Its end is this process's end, however it comes.
        read_end, lifeline = os.pipe()
        oom_kills = count_oom_kills()
        try:
            with log_path.open("ab") as log:
                offset = log.tell()
                process = await asyncio.create_subprocess_exec(
                    *(*command, "--lifeline-fd", str(read_end)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **template.environment},
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
            self._set(replace(self._runs[name].evaluation, phase="running"))
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    kill_group(process)
                    await process.wait()
        except OSError as error:
            return -1, f"cannot run {command[0]!r}: {error}", ""
        finally:
            os.close(read_end)
            os.close(lifeline)
        _, message = explain_exit(status, "", count_oom_kills() - oom_kills, log_tail(log_path, offset, 1))
        return status, message, _read(result)

    def _set(self, evaluation: Evaluation) -> None:
        if (run := self._runs.get(evaluation.name)) is not None and run.evaluation != evaluation:
            run.evaluation = evaluation
            self._on_change()


def _final_statuses(spec: Mapping[str, Any]) -> frozenset[int]:
    rules = spec.get("podFailurePolicy", {}).get("rules", ())
    statuses = (rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob")
    return frozenset((0, *(status for values in statuses for status in values)))


def _with_result(command: tuple[str, ...], spec: Mapping[str, Any], result: Path) -> tuple[str, ...]:
    """The command with a file of this machine in place of the container's termination log."""
    (container,) = spec["template"]["spec"]["containers"]
    inside = container.get("terminationMessagePath", "/dev/termination-log")
    return tuple(str(result) if argument == inside else argument for argument in command)


def _read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()[:MAX_OUTPUT_BYTES].decode(errors="replace")
    return ""
