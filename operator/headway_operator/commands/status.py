"""`headway status`: what a service says of itself, and its controller's last decisions in numbers.

Reads the service and the checkpoint in the ConfigMap NAME-memory, as the user that a kubeconfig names. Knows
nothing that `kubectl get` would not show.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.argument_types import integer
from headway.command_parser import CommandParser
from headway_operator.cluster.checkpoint_data import memory_in
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import HeadwayOperatorError
from headway_operator.names import KIND, memory_config_map
from headway_operator.times import timestamp

DEFAULT_DECISIONS = 5


def main(argv: list[str]) -> int:
    """Print it: 0 when done, 1 when there is no such service or no cluster to ask."""
    options = _parser().parse_args(argv)
    try:
        found = asyncio.run(_read(options))
    except HeadwayOperatorError as error:
        print(f"headway status: {error}", file=sys.stderr)
        return 1
    if found is None:
        where = f"namespace {options.namespace!r}"
        print(
            f"headway status: there is no {KIND} {options.name!r} in {where}; name another --namespace",
            file=sys.stderr,
        )
        return 1
    service, decisions = found
    if options.json:
        print(json.dumps({"status": service.get("status") or {}, "decisions": decisions}, indent=1))
    else:
        print(page(service, decisions[-options.decisions :], has_inputs=options.inputs))
    return 0


async def _read(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The service and all decisions that are kept; None where there is no such service."""
    async with await KubernetesApi.connect(options.kubeconfig, options.context) as api:
        service = await api.get(KIND, options.namespace, options.name)
        if service is None:
            return None
        checkpoint = await api.get("ConfigMap", options.namespace, memory_config_map(options.name))
    memory = memory_in(checkpoint or {}) or {}
    return service, list(memory.get("decisions") or ())


def page(service: Mapping[str, Any], decisions: Sequence[Mapping[str, Any]], *, has_inputs: bool) -> str:
    """The service for a person: conditions, advice, decisions (the oldest first)."""
    status = service.get("status") or {}
    display = status.get("display") or {}
    numbers = (f"{name} {display[name]}" for name in ("replicas", "ttft", "tpot") if name in display)
    lines = [f"{service['metadata']['namespace']}/{service['metadata']['name']}: {', '.join(numbers)}"]
    lines += [
        f"  {one['type']} is {one['status']} ({one['reason']}): {one['message']}"
        for one in status.get("conditions") or ()
    ]
    if advice := status.get("recommendation"):
        lines.append(f"recommended: {advice}")
    lines += _last_decision(status.get("lastDecision") or {})
    lines.append(
        "decisions:" if decisions else "no decision is kept yet; the checkpoint is a minute old at most"
    )
    for one in decisions:
        blocker = f", blocked by {one['blocker']}" if one["blocker"] else ""
        limits = f"{one['maxNumSeqs']} sequences, {one['maxNumBatchedTokens']} tokens"
        since = f"{timestamp(one['since'])} to {timestamp(one['at'])}"
        lines.append(f"  {since}: {one['cause']}{blocker}: {one['replicas']} replicas, {limits}")
        lines.append(f"    {one['message']}")
        if has_inputs:
            lines += [f"    {name} {value:g}" for name, value in one["inputs"].items()]
    return "\n".join(lines)


def _last_decision(last: Mapping[str, Any]) -> list[str]:
    """What stands now; nothing for a service that no pass has decided on."""
    if last.get("replicas") is None:
        return []
    since = f"since {last['since']}: " if last.get("since") else ""
    candidate = last.get("candidateReplicas")
    asked = "" if candidate is None else f" (the load asks for {candidate})"
    blocker = f", blocked by {last['blocker']}" if last.get("blocker") else ""
    limits = f"{last.get('maxNumSeqs')} sequences, {last.get('maxNumBatchedTokens')} tokens"
    wanted = f"{last['replicas']} replicas{asked}, {limits}"
    return [f"wanted {since}{wanted}: {last.get('cause')}{blocker}", f"  {last.get('message')}"]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="headway status", description="What a service's controller last decided, and why."
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="of the InferenceService")
    add("-n", "--namespace", default="default", help="default: default")
    add(
        "--decisions", type=integer(1), default=DEFAULT_DECISIONS, metavar="N", help="the last N (default: 5)"
    )
    add("--inputs", action="store_true", help="with the numbers behind each decision")
    add("--json", action="store_true", help="the status and all decisions that are kept, as JSON")
    add("--kubeconfig", type=Path, help="default: KUBECONFIG, else ~/.kube/config")
    add("--context", help="of the kubeconfig (default: its current one)")
    return parser
