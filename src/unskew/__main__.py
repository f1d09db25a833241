"""Where the command starts: an interrupt is understood before the long imports begin."""

import signal
import sys
from typing import Any


def main() -> None:
    """Import the command line and run it."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        from unskew.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("unskew: interrupted\n")
        sys.exit(130)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
