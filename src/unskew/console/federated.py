"""Flower's ServerApp: a run over the nodes that Flower's grid reaches, printed to the app's log."""

import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from unskew.console.progress import PlainConsole
from unskew.console.screen import Screen, summary
from unskew.core.errors import ClientFailure, UserError
from unskew.engines.flower.grid import GridExchange
from unskew.runs.federated import check_nodes, run_federated, settings_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run configuration asks for; a mistake in it ends the app with one message."""
    out = PlainConsole()
    screen = Screen(out)
    try:
        asked = settings_of(dict(context.run_config))
        if asked.check:
            check_nodes(GridExchange(grid), asked, screen.note)
            return
        result = run_federated(GridExchange(grid), asked, screen, screen.note)
    except (UserError, ClientFailure) as error:
        sys.stderr.write(f"unskew: {error}\n")
        raise  # Flower marks its run as failed by that
    finally:
        screen.close()
    out.print(summary(result))
