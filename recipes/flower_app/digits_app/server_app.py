"""What runs on the server."""
# ruff: noqa: T201  it prints, as apps do

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import unskew.flower  # unskew
from digits_app.task import Network, accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """FedAvg, then calibration."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # noqa: TID251  an outsider's program seeds as PyTorch's users do
    nodes = int(context.run_config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    model = Network()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(torch_state_dict=model.state_dict()),
        num_rounds=int(context.run_config["rounds"]),
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    print(f"after FedAvg {accuracy(model):.4f}")

    method = str(context.run_config["calibrate"])  # unskew
    model.classifier = unskew.flower.calibrate(grid, model.classifier, result.arrays, method=method)  # unskew
    print(f"after {method} {accuracy(model):.4f}")
