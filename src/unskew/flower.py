"""Calibration for an existing Flower app: a handler for its ClientApp, one call for its ServerApp.

On the nodes, next to the app's own handlers:

    unskew.flower.answer_statistics(app, encoder_and_batches, classes=10)

``encoder_and_batches(message, context)`` loads the weights in ``message.content["arrays"]`` and returns the network
without its classifier, and the node's batches of (images, labels). On the server, after the last round:

    model.classifier = unskew.flower.calibrate(grid, model.classifier, result.arrays, method="ccvr")

The nodes measure class statistics of their features; the server sums them and rebuilds the classifier. No image and
no feature is ever sent; the privacy page describes what the statistics reveal. Nothing else in the app changes.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from unskew.calibration import parse_calibration
from unskew.calibration.calibrate import calibrate as calibrate_with
from unskew.calibration.classifier import CalibratedClassifier, last_linear
from unskew.calibration.finisher import Finisher, RealFeatures
from unskew.calibration.protection import drop_small_classes
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.files import write_again
from unskew.core.plugins import require_extra
from unskew.core.units import counted

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

    Give = Callable[[Message, Context], tuple[nn.Module, Iterable[Any]]]

ACTION = "unskew_statistics"  # the message type is "query.unskew_statistics"
RECORD = "unskew"


def answer_statistics(app: "ClientApp", give: "Give", *, classes: int, least: int = 1) -> None:
    """Make a ClientApp answer the server's request for class statistics.

    Parameters
    ----------
    app
        The app.
    give
        Called with the message and the context; returns the encoder, which maps images to features, and the node's
        batches of (images, labels).
    classes
        The number of classes.
    least
        Classes with fewer examples on this node are left out.
    """

    @app.query(ACTION)
    def answer(message: "Message", context: "Context") -> "Message":
        flower, request = require_extra("flwr.app", "flower"), cast(Any, message.content[RECORD])
        if request["classes"] != classes:
            asked = request["classes"]
            raise UserError(f"the server's classifier has {asked} classes, but this node's data have {classes}")
        measured = ClassStatistics.measure(*give(message, context), classes, form=str(request["form"]))
        content = drop_small_classes(measured, least)[0].to_bytes()
        record = flower.ArrayRecord({"statistics": flower.Array("uint8", (len(content),), "unskew", content)})
        return cast("Message", flower.Message(flower.RecordDict({RECORD: record}), reply_to=message))


@dataclass(frozen=True)
class Gathered:
    """The sum over the nodes that answered, and why others are missing."""

    statistics: ClassStatistics
    nodes: tuple[int, ...]
    failures: dict[int, str] = field(default_factory=dict)


def gather(
    grid: "Grid",
    arrays: "ArrayRecord",
    *,
    classes: int,
    form: str = "full",
    timeout: float = 600.0,
    min_replies: int = 1,
) -> Gathered:
    """Ask every node for the class statistics of its features under these weights, check them and sum them.

    Parameters
    ----------
    grid
        Flower's grid, as the ServerApp receives it.
    arrays
        The trained weights, as the app sends them to its nodes.
    classes
        The number of classes.
    form
        The form of the covariances: full, diagonal, shared or low-rank.
    timeout
        Seconds to wait for replies.
    min_replies
        The minimum number of replies.

    Returns
    -------
    Gathered
        The sum, the nodes in it, and why others are missing.
    """
    app = require_extra("flwr.app", "flower")
    content = {"arrays": arrays, RECORD: app.ConfigRecord({"classes": classes, "form": form})}
    nodes = list(grid.get_node_ids())
    messages = [app.Message(app.RecordDict(content), node, f"query.{ACTION}", ttl=timeout) for node in nodes]
    parts = list[tuple[int, ClassStatistics]]()
    failures = dict.fromkeys(nodes, f"it did not answer within {timeout:.0f} s")
    for reply in grid.send_and_receive(messages, timeout=timeout):
        node = reply.metadata.src_node_id
        try:
            if reply.has_error():
                raise UserError(reply.error.reason or f"Flower's error {reply.error.code}")
            parts.append((node, _statistics(reply, classes, form)))
            failures.pop(node, None)
        except UserError as error:
            failures[node] = str(error)
    if len(parts) < (least := max(1, min_replies)):
        reasons = "; ".join(f"node {node}: {reason}" for node, reason in failures.items()) or "no node is connected"
        raise UserError(f"{counted(len(parts), 'node')} sent class statistics, but {least} are needed: {reasons}")
    parts.sort(key=lambda part: part[0])  # so that the sum does not depend on the order of arrival
    total = ClassStatistics.merged(part for _, part in parts)
    return Gathered(total, tuple(node for node, _ in parts), failures)


def calibrate(
    grid: "Grid",
    classifier: nn.Module,
    arrays: "ArrayRecord",
    *,
    method: str | Finisher = "ccvr",
    seed: int = 0,
    timeout: float = 600.0,
    min_replies: int = 1,
) -> CalibratedClassifier:
    """Build a new classifier from the class statistics of all nodes.

    Nodes that fail or do not answer in time are left out, with a warning that includes the reason.

    Parameters
    ----------
    grid
        Flower's grid, as the ServerApp receives it.
    classifier
        The model's last linear layer.
    arrays
        The trained weights, as the app sends them to its nodes.
    method
        The calibration, such as ``"ccvr(per_class=500)"``.
    seed
        The same seed gives the same classifier.
    timeout, min_replies
        As for ``gather``.

    Returns
    -------
    CalibratedClassifier
        A module that replaces the classifier.
    """
    needs = parse_calibration(method).needs
    if isinstance(needs, RealFeatures):
        raise UserError(f"{method} needs the nodes' real features, which never leave them; use ccvr, lda or ridge")
    if needs.components > 1 or needs.expand:
        raise UserError(f"{method}: components and expand need more than one exchange with the nodes; leave them out")
    classes = last_linear(classifier).out_features
    gathered = gather(grid, arrays, classes=classes, form=str(needs.form), timeout=timeout, min_replies=min_replies)
    for node, reason in gathered.failures.items():
        warnings.warn(f"node {node} is left out of the calibration: {reason}", stacklevel=2)
    return calibrate_with(classifier, gathered.statistics, method, seed)


def _statistics(reply: "Message", classes: int, form: str) -> ClassStatistics:
    """A node's statistics, checked because the node is not trusted."""
    record: Any = reply.content.get(RECORD)
    content = getattr(record.get("statistics") if isinstance(record, Mapping) else None, "data", b"")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "statistics.safetensors"
        write_again(file, content)
        try:
            statistics = ClassStatistics.load(file)
        except UserError as error:
            raise UserError(str(error).replace(str(file), "its answer")) from error
    if (statistics.classes, str(statistics.form)) != (classes, form):
        sent = f"{statistics.form} statistics for {statistics.classes}"
        raise UserError(f"it sent {sent} classes; expected {form} statistics for {classes} classes")
    return statistics
