"""A federated run as its server shows it: what Flower's ServerApp calls, printing to that app's log."""

import sys
from collections.abc import Mapping
from typing import Any

from unskew.console.plain import PlainConsole
from unskew.console.screen import Screen, summary
from unskew.core.errors import ClientFailure, UserError
from unskew.engines.flower.exchange import Exchange
from unskew.runs.federated import run_federated, settings_of


def serve(exchange: Exchange, run_config: Mapping[str, Any]) -> None:
    """Run what Flower's run configuration asks for, and print how it goes."""
    out = PlainConsole()
    screen = Screen(out)
    try:
        result = run_federated(exchange, settings_of(run_config), screen, screen.note)
    except (UserError, ClientFailure) as error:
        sys.stderr.write(f"unskew: {error}\n")
        raise  # Flower marks its run as failed by that
    finally:
        screen.close()
    out.print(summary(result))
