"""How `headway up` shows a service: a table for a terminal, lines for a log. Pure: it reads and formats."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway_operator.local_service import LocalService
from headway_operator.state import Replica

PHASE_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "pending": "yellow",
    "draining": "cyan",
    "failed": "red",
}
MAX_CAUSE_CHARACTERS = 160
NOT_TAKEN_OVER = "manifest not taken over, the last good one stays in force"


def table(service: LocalService) -> RenderableType:
    """The whole picture of this moment."""
    status = service.status
    ready = condition(status, "Ready")
    title = Text.assemble(
        (str(service.key), "bold"), "  ", (service.url, "underline"), "  ", _ready_text(ready)
    )
    if condition(status, "SLOMet").get("status") == "False":
        title.append("  SLO missed", "red")
    parts: list[RenderableType] = [title, Text(_numbers(status))]
    if service.file_error:
        parts.append(Text(f"{NOT_TAKEN_OVER}: {service.file_error}", "red"))
    if quality := condition(status, "QualityVerified"):
        style = {"True": "green", "False": "red"}.get(quality["status"], "yellow")
        parts.append(Text(f"quality {status['display']['quality']}: {quality['message']}", style))
    replicas = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("replica", "phase", "port", "running", "waiting", "restarts", "cause"):
        replicas.add_column(
            column, justify="right" if column in ("running", "waiting", "restarts") else "left"
        )
    for process in service.cluster.processes:
        if not process.revision:
            continue
        replica = process.snapshot()
        running, waiting = _load(service, replica.name)
        phase = Text(replica.phase, PHASE_STYLES[replica.phase])
        port = "" if process.port is None else str(process.port)
        cause = cause_of(replica)
        replicas.add_row(replica.name, phase, port, running, waiting, str(replica.num_restarts), cause)
    parts += [replicas, Text(decision(status) or "no decision yet", "italic")]
    degraded = condition(status, "Degraded")
    if degraded.get("status") == "True":
        parts.append(Text(f"{degraded['reason']}: {degraded['message']}", "red"))
    parts.append(Text(f"logs: {service.cluster.workspace.logs}    stop: Ctrl-C", "dim"))
    return Group(*parts)


def line(service: LocalService) -> str:
    """One line that changes only when something worth a line has."""
    status = service.status
    if not status:
        return ""
    ready = condition(status, "Ready")
    state = "Ready" if ready.get("status") == "True" else f"not Ready ({ready.get('reason', 'unknown')})"
    limits = status.get("limits") or {}
    parts = [state]
    if "desiredReplicas" in status:
        parts.append(f"replicas {status.get('readyReplicas', 0)}/{status['desiredReplicas']}")
    if limits:
        parts.append(f"max_num_seqs {limits['maxNumSeqs']}")
        parts.append(f"max_num_batched_tokens {limits['maxNumBatchedTokens']}")
    if quality := condition(status, "QualityVerified"):
        told = "" if quality["status"] == "Unknown" else f" ({quality['message']})"
        parts.append(f"quality {status['display']['quality']}{told}")
    if service.file_error:
        parts.append(f"{NOT_TAKEN_OVER}: {service.file_error}")
    return ", ".join(parts)


def decision(status: Mapping[str, Any]) -> str:
    """The last decision in its own words."""
    return str((status.get("lastDecision") or {}).get("message") or "")


def decided(status: Mapping[str, Any]) -> tuple[object, ...]:
    """What the last decision was, without the numbers behind it."""
    last = status.get("lastDecision") or {}
    return tuple(
        last.get(part) for part in ("cause", "blocker", "replicas", "maxNumSeqs", "maxNumBatchedTokens")
    )


def condition(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One condition, or an empty mapping."""
    return next((c for c in status.get("conditions") or () if c["type"] == name), {})


def cause_of(replica: Replica) -> str:
    """Why a replica is not ready, cut to one line of a table."""
    words = ": ".join(part for part in (replica.reason, replica.message) if part)
    return words[:MAX_CAUSE_CHARACTERS]


def fetching(replica: Replica) -> str:
    """What a replica that does not listen yet says of the model that it fetches; "" where it says nothing."""
    is_fetching = replica.phase == "starting" and replica.address is None and not replica.reason
    return replica.message if is_fetching else ""


def serves_otherwise(service: LocalService, failed: Replica) -> bool:
    """Whether a replica of another revision than this one's is ready."""
    others = [one for one in service.cluster.processes if one.revision not in ("", failed.revision)]
    return any(one.phase == "ready" for one in others)


def _ready_text(ready: Mapping[str, Any]) -> Text:
    if not ready:
        return Text("starting", "yellow")
    is_ready = ready["status"] == "True"
    text = "Ready" if is_ready else f"not Ready: {ready['reason']}: {ready['message']}"
    return Text(text, "green" if is_ready else "yellow")


def _numbers(status: Mapping[str, Any]) -> str:
    display, limits = status.get("display") or {}, status.get("limits") or {}
    if not display:
        return ""
    return (
        f"replicas {display['replicas']}   "
        f"max_num_seqs {limits.get('maxNumSeqs', '-')}   "
        f"max_num_batched_tokens {limits.get('maxNumBatchedTokens', '-')}   "
        f"TTFT {display['ttft']}   TPOT {display['tpot']}"
    )


def _load(service: LocalService, replica: str) -> tuple[str, str]:
    sample = service.outcome.sample if service.outcome else None
    measured = sample.replicas.get(replica) if sample else None
    return ("", "") if measured is None else (str(measured.running), str(measured.waiting))
