"""Flower's ServerApp: a run on the nodes of Flower's grid, printed to the app's log."""

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
    """Do what the run configuration requests; a mistake in it ends the app with one message."""
    out = PlainConsole()
    screen = Screen(out)
    try:
        request = settings_of(dict(context.run_config))
        if request.check:
            check_nodes(GridExchange(grid), request, screen.note)
            return
        result = run_federated(GridExchange(grid), request, screen, screen.note)
    except (UserError, ClientFailure) as error:
        sys.stderr.write(f"unskew: {error}\n")
        raise  # so that Flower marks its run as failed
    finally:
        screen.close()
    out.print(summary(result))
