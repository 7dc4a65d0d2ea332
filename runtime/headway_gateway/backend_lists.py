"""Follows whichever list of backends there is for as long as the process lives.

What a list's own module foresees, it deals with. An error that it does not is a fault of ours, or of a list
as nobody has seen one: before the first list it ends the gateway, which knows nobody to ask. Later the last
list stays, for its replicas are still there, and is followed anew after a pause that doubles from 0.2 s to
10 s.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from headway_gateway.application import Application
from headway_gateway.config import GatewayConfig
from headway_gateway.errors import BackendListError, ConfigError

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
log = logging.getLogger(__name__)


async def follow(config: GatewayConfig, application: Application) -> None:
    """Hand the application each list that comes.

    Raises, and only before the first: ConfigError, where a flag is wrong; BackendListError, for what nobody
    foresaw.
    """
    await keep_following(
        lambda: _source(config, application),
        has_list=lambda: application.pool.has_list,
        on_error=application.note_backend_list_error,
    )


async def keep_following(
    begin: Callable[[], Coroutine[None, None, None]],
    *,
    has_list: Callable[[], bool],
    on_error: Callable[[], None],
) -> None:
    """Begin what follows a list, and again whenever it fails; errors as of `follow`."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        began_at = asyncio.get_running_loop().time()
        try:
            await begin()
        except Exception as error:
            on_error()
            if not has_list():
                if isinstance(error, ConfigError):
                    raise
                raise BackendListError(
                    f"no list of backends can be had: {type(error).__name__}: {error}; this is a fault of "
                    "the gateway or of what the list comes from, please report it with the log"
                ) from error
            if asyncio.get_running_loop().time() - began_at > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            log.exception("kept the last list of backends; following it anew in %.1f s", pause)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


def _source(config: GatewayConfig, application: Application) -> Coroutine[None, None, None]:
    told = application.pool.update, application.note_backend_list_error, application.note_backend_list_seen
    if config.backends_file is not None:
        from headway_gateway.backends_file import BackendsFile

        return BackendsFile(config.backends_file, *told).run()
    assert config.kubernetes_service is not None, "the parser requires one of the two"
    # Imported here: the Kubernetes client costs a second and much memory, and the local world has none.
    from headway_gateway.endpoint_slices import EndpointSliceWatch

    return EndpointSliceWatch(config.kubernetes_service, *told).run()
