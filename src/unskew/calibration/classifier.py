"""The calibrated classifier: a transformation of the features, then the new head; and a report.

Shapes: n features of d dimensions, C classes.
"""

import copy
import json
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from unskew.calibration.covariances import CLIPPED, MAX_FEATURES, ClassReport
from unskew.core import tensors
from unskew.core.errors import UserError, a_kind, whole_number
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.types import Tensors
from unskew.models.networks import device_of
from unskew.privacy.ledger import Release

NEVER = -1e9  # the logit of a class without a row in a new classifier, below all others


def copy_head(head: nn.Module) -> nn.Module:
    """A trainable copy of the head in eval mode, even if the head is frozen; a linear layer always has a bias."""
    if not isinstance(head, nn.Linear):
        return copy.deepcopy(head).eval().requires_grad_()
    linear = empty_linear(head.in_features, head.out_features, head.weight.dtype, head.weight.device)
    with torch.no_grad():
        linear.weight.copy_(head.weight)
        linear.bias.copy_(torch.zeros_like(linear.bias) if head.bias is None else head.bias)
    return linear


def last_linear(head: nn.Module) -> nn.Linear:
    """The layer whose rows belong to the classes."""
    layers = [part for part in head.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise UserError(f"a classifier must end in an nn.Linear, but {a_kind(head)} contains none")
    return layers[-1]


def empty_linear(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Linear:
    """A layer without initial weights, which the caller overwrites."""
    return nn.Linear(inputs, outputs, dtype=dtype, device="meta").to_empty(device=device)


def replace_rows(head: nn.Module, weight: Tensor, bias: Tensor, held: Tensor) -> nn.Linear:
    """A linear layer with these rows [P, d] and biases [P] for the classes ``held``.

    The others keep the rows of a linear head of the same width; without one they are never predicted.
    """
    linear, last = copy_head(head), last_linear(head)
    if not isinstance(linear, nn.Linear) or linear.in_features != weight.shape[1]:
        linear = empty_linear(weight.shape[1], last.out_features, last.weight.dtype, last.weight.device)
        nn.init.zeros_(linear.weight)
        nn.init.constant_(linear.bias, max(NEVER, torch.finfo(linear.bias.dtype).min))
    with torch.no_grad():
        rows = held.to(linear.weight.device)
        linear.weight[rows] = weight.to(linear.weight)
        linear.bias[rows] = bias.to(linear.bias)
    return linear


def require_finite(features: Tensor) -> None:
    """Reject features with NaN or infinity."""
    if not bool(features.isfinite().all()):
        raise UserError("the features contain NaN or infinity; check the encoder and its images")


class Transformation(nn.Module):
    """ReLU, then Tukey's power: x^λ for λ above 0, log x for 0. It makes the features more Gaussian."""

    def __init__(self, relu: bool = False, tukey: float = 1.0) -> None:
        super().__init__()
        self.relu = relu
        self.tukey = float(tukey)

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        if self.relu:
            features = features.clamp(min=0)
        if self.tukey == 0.0:
            features = features.clamp(min=1e-12).log()
        elif self.tukey != 1.0:
            features = features.pow(self.tukey)
        return features


class Lift(nn.Module):
    """ReLU of m random sums of the features, and of the features: [ReLU(z·W), ReLU(z)].

    A linear classifier on top of it is piecewise linear in the features. W depends only on d and m, so every client has
    the same one. The scale of the features does not matter.
    """

    weight: Tensor  # [d, m]

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            raise UserError("Lift: weight must be a tensor [d, m] of floats; Lift.of(d, m) draws one")
        self.register_buffer("weight", weight)

    @staticmethod
    @neutral()
    def of(width: int, expand: int) -> "Lift":
        """The lift that adds ``expand`` random features to ``width`` features."""
        width, expand = whole_number(width, "width", 1, MAX_FEATURES), whole_number(expand, "expand", 0, MAX_FEATURES)
        return Lift(_draw_lift(width, expand).clone())

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, m + d]."""
        return torch.cat([features @ self.weight.to(features.dtype), features], dim=1).relu()


def limit_length(features: Tensor, clip: float) -> Tensor:
    """[n, d], features longer than ``clip`` (L2) scaled down to just below it; 0: no limit."""
    if clip == 0.0:
        return features
    length = torch.linalg.vector_norm(features.double(), 2, dim=[1], keepdim=True)  # [n, 1]
    rounding = 2.0**-7  # torch.finfo(features.dtype).eps, which TorchScript lacks
    if features.dtype == torch.float64:
        rounding = 2.0**-52
    elif features.dtype == torch.float32:
        rounding = 2.0**-23
    elif features.dtype == torch.float16:
        rounding = 2.0**-10
    below = clip * (1 - 4 * rounding)
    return torch.where(length > clip, (features.double() * (below / length)).to(features.dtype), features)


@lru_cache(maxsize=2)
def _draw_lift(width: int, expand: int) -> Tensor:
    """[d, m] with standard deviation 1/√d, so that a random sum is about as large as one feature."""
    return torch.randn(width, expand, generator=Key(0).fold("lift", width).torch()).div_(math.sqrt(width))


@dataclass(frozen=True)
class Report:
    """What a calibration did: a report per class, the classes that kept their row, the time it took."""

    method: str
    classes: tuple[ClassReport, ...]
    kept_rows: tuple[int, ...]
    loss_before: float
    loss_after: float
    seconds: float
    remarks: tuple[str, ...] = ()  # the calibration's own
    release: Release | None = None  # the private release that it was made from

    def notes(self) -> list[str]:
        """The calibration's own remarks, and changes to covariances; may be empty."""
        notes, every = list(self.remarks), f"{len(self.classes)} class Gaussians"
        if shrunk := [row.shrunk for row in self.classes if 0 < row.shrunk < 1 or (row.count == 1 and row.shrunk)]:
            notes.append(
                f"{len(shrunk)} of {every} have fewer examples than features: their covariance was mixed with the "
                f"pooled one, with weight up to {max(shrunk):.2f}"
            )
        if (clipped := max((row.clipped for row in self.classes), default=0.0)) > CLIPPED:
            notes.append(f"negative eigenvalues were set to zero, at most {clipped:.2g} of a covariance")
        if (rest := max((row.left_over for row in self.classes), default=0.0)) > 0:
            notes.append(f"the low-rank form leaves at most {rest:.0%} of a class's variance to the diagonal")
        return notes


class CalibratedClassifier(nn.Module):
    """Replaces the classifier: a transformation of the features, then the new head.

    It can be traced and exported, alone or inside a model, and scripted if its head can be.

    Parameters
    ----------
    before
        A ``Transformation`` or a ``Lift``.
    head
        A linear layer, a copy of the network's head with other values, or any other module.
    report
        What the calibration did.
    layers
        The number of the network's linear layers that it replaces.
    clip
        The length to which features were clipped for the statistics. 0: no limit.
    width
        The number of features of a head that is any other module, which is saved as a graph of its operations. 0: for a
        linear layer or a copy of the network's head only the values are saved.
    """

    def __init__(
        self, before: nn.Module, head: nn.Module, report: Report, layers: int = 1, clip: float = 0.0, width: int = 0
    ) -> None:
        super().__init__()
        self.before = before
        self.head = head
        self.report = report
        self.layers = layers
        self.clip = float(clip)
        self.width = width
        self.lifted = isinstance(before, Lift)

    @neutral()
    def tensors(self) -> Tensors:
        """All its values by name, on the CPU, for ``load_calibrated``."""
        steps = [float(self.layers), 0.0, 1.0, self.clip, *([float(self.width)] if self.width else [])]
        if isinstance(self.before, Transformation):
            steps[1:3] = [float(self.before.relu), self.before.tukey]
        lift = {"lift": self.before.weight.cpu()} if isinstance(self.before, Lift) else {}
        values = write_graph(copy.deepcopy(self.head), self.width) if self.width else self.head.state_dict()
        head = {f"head.{name}": value.detach().cpu() for name, value in values.items()}
        return {"steps": torch.tensor(steps, dtype=torch.float64), **lift, **head}

    @neutral()
    def linear(self) -> nn.Linear:
        """A plain ``nn.Linear`` with the same values: ``model.fc = calibrated.linear()``.

        Refused if features are transformed first, or if the head has several layers: then use this module itself.
        """
        bends = isinstance(self.before, Transformation) and (self.before.relu or self.before.tukey != 1)
        layer = copy_head(self.head)
        if self.lifted or bends or self.clip or not isinstance(layer, nn.Linear):
            raise UserError(
                f"{self.report.method} is not one linear layer: it transforms or clips the features first, or has "
                "several layers; use the calibrated module itself"
            )
        return layer

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, C]."""
        if self.lifted:  # the statistics are of lifted features, clipped after lifting
            features = limit_length(self.before(features), self.clip)
        else:
            features = self.before(limit_length(features, self.clip))
        logits: Tensor = self.head(features)
        return logits


def load_calibrated(values: Tensors, cut: Callable[[int], tuple[nn.Module, nn.Module]]) -> tuple[nn.Module, nn.Module]:
    """Encoder and calibrated classifier, from ``CalibratedClassifier.tensors`` and a function that cuts the network."""
    layers, relu, tukey, clip, width = (*values["steps"].tolist(), 0.0)[:5]  # the last one only for a graph
    encoder, plain = cut(int(layers))
    before = Lift(values["lift"]) if "lift" in values else Transformation(bool(relu), tukey)
    state = tensors.under(values, "head.")
    if GRAPH in state:
        head: nn.Module = read_graph(state)
    else:
        weight = state["weight"] if set(state) == {"weight", "bias"} else None
        head = copy.deepcopy(plain) if weight is None else empty_linear(weight.shape[1], len(weight), weight.dtype)
        head.load_state_dict(state)
    report = Report("this calibration", (), (), float("nan"), float("nan"), 0.0)
    classifier = CalibratedClassifier(before, head, report, int(layers), clip, int(width))
    return encoder, classifier.to(device_of(plain)).eval()


# A calibration may return a module of a class that only its author has. What is saved is the computation, as
# ``torch.export`` traces it: PyTorch operations on named tensors, as JSON. Loading it runs no other code.

ON_SIZES = {name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv")}
KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
GRAPH = "graph"  # the name of the JSON text, as bytes, among the tensors


def write_graph(module: nn.Module, width: int) -> Tensors:
    """The module's tensors by number and its operations on features [n, ``width``] as JSON under ``graph``.

    The module is moved to the CPU.
    """
    values = (value for value in (*module.parameters(), *module.buffers()) if value.is_floating_point())
    dtype = next((value.dtype for value in values), torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch.export itself
            example = torch.zeros(2, width, dtype=dtype)
            shapes = ({0: torch.export.Dim.DYNAMIC},)
            program = torch.export.export(module.cpu().eval(), (example,), dynamic_shapes=shapes).run_decompositions()
    except Exception as error:  # torch.export raises many kinds
        line = str(error).strip().partition("\n")[0]
        hint = "write forward with tensor operations that work for any number of rows"
        raise UserError(f"{a_kind(module)} cannot be saved because torch.export failed: {line}; {hint}") from error
    inputs = program.graph_signature
    names = {**inputs.inputs_to_parameters, **inputs.inputs_to_buffers, **inputs.inputs_to_lifted_tensor_constants}
    known = {**program.state_dict, **program.constants}
    tensors: Tensors = {}
    steps: list[Any] = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            steps.append([node.name, "tensor", len(tensors)])
            tensors[str(len(tensors))] = known[names[node.name]].detach().clone().contiguous()
        elif node.op == "placeholder":
            steps.append([node.name, "features"])
        elif node.op == "call_function":
            name = node.target.__name__ if node.target in ON_SIZES.values() else str(node.target)
            _operation(name)  # refuse to write what cannot be read
            args, kwargs = (fx.node.map_aggregate(part, _plain) for part in (node.args, node.kwargs))
            steps.append([node.name, name, args, {"given": kwargs}])
        else:
            steps.append(["", "output", _plain(node.args[0][0])])
    text = json.dumps(steps).encode()
    return {GRAPH: torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}


def read_graph(values: Tensors) -> nn.Module:
    """A module with the operations that ``write_graph`` saved."""
    root, graph = nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, operation, *rest in json.loads(values[GRAPH].numpy().tobytes()):
        if operation == "features":
            nodes[name] = graph.placeholder("features")
        elif operation == "tensor":
            root.register_buffer(f"tensor_{int(rest[0])}", values[str(int(rest[0]))])
            nodes[name] = graph.get_attr(f"tensor_{int(rest[0])}")
        elif operation == "output":
            graph.output(_value(rest[0], nodes))
        else:
            nodes[name] = graph.call_function(_operation(operation), *(_value(part, nodes) for part in rest))
    graph.lint()
    return fx.GraphModule(root, graph).eval()


def _operation(name: str) -> Any:
    """A tensor operation by name: one of PyTorch's core set, or a pure one whose first argument is a tensor.

    Others may read files or modify their arguments.
    """
    if name in ON_SIZES:
        return ON_SIZES[name]
    family, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet, None), overload, None) if family == "aten" else None
    if isinstance(operation, torch._ops.OpOverload) and not operation._schema.is_mutable:
        arguments = operation._schema.arguments
        if torch.Tag.core in operation.tags or (arguments and str(arguments[0].type) == "Tensor"):
            return operation
    raise UserError(f"the operation {name[:80]!r} cannot be part of a saved classifier")


def _plain(value: Any) -> Any:
    """An argument for JSON: a node by its name, a dtype or device by its kind."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, of in KINDS.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(f"{a_kind(value)} as a constant cannot be part of a saved classifier")


def _value(plain: Any, nodes: dict[str, fx.Node]) -> Any:
    """The inverse of ``_plain``."""
    if isinstance(plain, list):
        return tuple(_value(part, nodes) for part in plain)
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "node":
        return nodes[value]
    if kind == "given":
        return {name: _value(part, nodes) for name, part in value.items()}
    if kind == "device":
        return torch.device(value)
    constant = getattr(torch, value, None)
    if not isinstance(constant, KINDS[kind]):
        raise ValueError(f"{value!r} is not a {kind}")
    return constant
