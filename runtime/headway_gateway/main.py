"""`headway gateway`: stand in front of a service's replicas; Headway starts it itself."""

import asyncio
import logging
import sys

from headway import __version__
from headway.event_loop import loop_factory
from headway_gateway.config import parse_config
from headway_gateway.errors import BackendListError, ConfigError
from headway_gateway.json_log import set_up_logging
from headway_gateway.lifecycle import serve


def main(argv: list[str]) -> int:
    """Run one gateway until it is told to end."""
    config = parse_config(argv)
    set_up_logging(config.log_level)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve(config, __version__))
    except ConfigError as error:
        print(f"headway gateway: {error}", file=sys.stderr)
        return 2
    except BackendListError as error:
        logging.getLogger(__name__).exception("ended: the list of backends cannot be followed")
        print(f"headway gateway: {error}", file=sys.stderr)
        return 1
