"""The ServiceAccount that this operator runs as, which owns what the operator keeps for itself.

A Secret or a Lease that nobody owns would outlive an uninstalled chart. The account goes with the chart, and
Kubernetes then deletes what it owns. Its name and uid stand in the token of its pods; nothing is asked.
"""

import base64
import json
from pathlib import Path
from typing import Any

TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def owners(token_file: Path = TOKEN_FILE) -> list[dict[str, Any]]:
    """`ownerReferences` that name the account; none outside of a pod, where there is no such token."""
    try:
        payload = token_file.read_text().split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        account = claims["kubernetes.io"]["serviceaccount"]
        return [
            {"apiVersion": "v1", "kind": "ServiceAccount", "name": account["name"], "uid": account["uid"]}
        ]
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        return []
