"""The operator's key pair in a Secret of its own namespace: read, or made once, whoever comes first.

It is read again twice a minute. Another pair there, or none, is how an administrator has it rotated.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.secret import secret_values
from headway_operator.errors import ClusterError, ConflictError, KeyPairError
from headway_operator.keys import HANDOVER_SECONDS, AdminKeys, KeyRing
from headway_operator.names import (
    FIELD_MANAGER,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    OPERATOR_KEY_SECRET,
    PUBLIC_KEY_FILE,
)

PRIVATE_KEY_FILE = "private.pem"
LOOK_SECONDS = 30.0
logger = logging.getLogger(__name__)


async def load_or_create_keys(
    api: KubernetesApi, namespace: str, owners: Sequence[Mapping[str, Any]] = ()
) -> AdminKeys:
    """The pair in the Secret `headway-admin-key`; of two operators that make it at once, both use the first.

    owners: of a Secret that is made; without them it stays for ever.

    Raises ClusterError when it can neither be read nor made, KeyPairError when it holds something else.
    """
    for _ in range(2):
        secret = await api.get("Secret", namespace, OPERATOR_KEY_SECRET)
        if secret is not None:
            values = secret_values(secret)
            private_pem = values.get(PRIVATE_KEY_FILE, b"").decode(errors="replace")
            return AdminKeys.from_pem(private_pem, values.get(PUBLIC_KEY_FILE, b"").decode(errors="replace"))
        made = AdminKeys.generate()
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": OPERATOR_KEY_SECRET,
                "namespace": namespace,
                "labels": {NAME_LABEL: "headway", MANAGED_BY_LABEL: FIELD_MANAGER},
                "ownerReferences": [*owners],
            },
            "stringData": {PRIVATE_KEY_FILE: made.private_pem(), PUBLIC_KEY_FILE: made.public_pem},
        }
        try:
            await api.create(manifest)
        except ConflictError:
            continue  # another operator was faster: read what it made
        return made
    raise ClusterError(
        f"Secret {namespace}/{OPERATOR_KEY_SECRET} comes and goes; leave it alone and start again"
    )


async def follow_keys(
    api: KubernetesApi,
    namespace: str,
    ring: KeyRing,
    owners: Sequence[Mapping[str, Any]] = (),
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Keep `ring` as the Secret is. What cannot be read changes nothing, and is said once."""
    told = ""
    while True:
        await asyncio.sleep(look_seconds)
        try:
            keys = await load_or_create_keys(api, namespace, owners)
        except (ClusterError, KeyPairError) as error:
            if str(error) != told:
                logger.warning("goes on with the admin keys that it has: %s", error)
            told = str(error)
            continue
        told = ""
        if ring.adopt(keys):
            logger.info(
                "the admin keys are others; pods are told now, a new pair signs in %g s", HANDOVER_SECONDS
            )
