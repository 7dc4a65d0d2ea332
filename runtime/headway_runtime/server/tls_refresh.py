"""Certificates that are renewed while the server runs."""

import asyncio
import logging
import os
import ssl

from headway_runtime.errors import ConfigError
from headway_runtime.server.tls import TlsOptions, load_files, tls_context

logger = logging.getLogger(__name__)

# How often files are looked at. Certificates are renewed days before they end.
REFRESH_SECONDS = 5.0


async def keep_fresh(context: ssl.SSLContext, options: TlsOptions) -> None:
    """Load the files again whenever they change; what cannot be loaded is logged, and the old ones stay."""
    seen = _versions(options)
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        versions = _versions(options)
        if versions == seen:
            continue
        seen = versions
        try:
            # A key and a certificate that do not fit would break every handshake: tried elsewhere first.
            await asyncio.to_thread(tls_context, options)
            load_files(context, options)
        except ConfigError as error:
            logger.warning("renewed certificate not taken: %s", error)
        else:
            logger.info("renewed certificate %s taken", options.certfile)


def _versions(options: TlsOptions) -> list[tuple[int, int] | None]:
    """Of each file, what changes when it is written or (as Kubernetes does) replaced."""
    found: list[tuple[int, int] | None] = []
    for path in (options.certfile, options.keyfile, options.ca_certs):
        try:
            status = os.stat(path) if path is not None else None
        except OSError:
            status = None  # being replaced; it will change again
        found.append(None if status is None else (status.st_mtime_ns, status.st_ino))
    return found
