"""`python -m walstream.capture CONFIG.toml`: a capture without the command line around it, for tests and benchmarks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from walstream import config, logs
from walstream.capture.runner import run
from walstream.cli.interrupt import Interrupt
from walstream.error_codes import codes
from walstream.errors import WalstreamError


def main(arguments: list[str]) -> int:
    """Run until SIGTERM, and return the exit code."""
    loaded = config.load(Path(arguments[0]), os.environ).config
    logs.set_up(loaded.node.log_level, loaded.node.log_format)
    with Interrupt() as interrupt:
        try:
            run(loaded, lambda: interrupt.requested, retry="--retry" in arguments)
        except WalstreamError as error:
            logs.get(__name__).error("capture failed", error=str(error), kind=type(error).__name__)
            return codes(error).exit
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
