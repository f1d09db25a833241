"""What runs on the nodes."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import unskew.flower  # unskew
from digits_app.task import Network, batches_of, train

app = ClientApp()


def load(message: Message) -> Network:
    """The model with the weights that the server sent."""
    torch.set_num_threads(1)
    model = Network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


def own_batches(context: Context) -> list:
    """What this node holds."""
    return batches_of(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


@app.train()
def train_here(message: Message, context: Context) -> Message:
    """A round on this node."""
    model, batches = load(message), own_batches(context)
    train(model, batches)
    arrays = ArrayRecord(torch_state_dict=model.state_dict())
    metrics = MetricRecord({"num-examples": sum(len(labels) for _, labels in batches)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def encoder_and_batches(message: Message, context: Context) -> tuple:  # unskew
    """What class statistics are measured of."""
    return load(message).encoder, own_batches(context)  # unskew


unskew.flower.answer_statistics(app, encoder_and_batches, classes=10)  # unskew
