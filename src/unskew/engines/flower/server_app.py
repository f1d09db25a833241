"""The ServerApp: gives our driver the nodes that Flower's grid reaches."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from unskew.core.plugins import load_function
from unskew.engines.flower.grid import GridExchange

DRIVER = "unskew.console.federated:serve"  # by its name: it belongs to a layer above the engines

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run configuration asks for; a mistake in it ends the app with one message."""
    load_function(DRIVER, "driver")(GridExchange(grid), dict(context.run_config))
