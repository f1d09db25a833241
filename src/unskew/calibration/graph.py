"""Saves any module as the graph of tensor operations in its ``forward``, as JSON and tensors, and loads it again.

A calibration may return a module of a class that only its author has. What is saved is the computation, as
``torch.export`` traces it: PyTorch operations on named tensors. Loading it runs no other code.
"""

import json
import operator
import warnings
from typing import Any

import torch
from torch import fx, nn

from unskew.core.errors import UserError, a_kind
from unskew.core.types import Tensors

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
        hint = "write forward as operations on tensors, for any number of rows"
        raise UserError(f"{a_kind(module)} cannot be saved, since torch.export fails: {line}; {hint}") from error
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
            steps.append([node.name, name, _plain(node.args), _plain(node.kwargs)])
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
    """A value for JSON: a node by its name, a dtype or device by its kind."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, of in KINDS.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {"given": {name: _plain(part) for name, part in value.items()}}
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
