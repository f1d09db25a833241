"""From class statistics to a calibrated classifier: runs a calibration, and checks its input and output.

Shapes: n features of d dimensions.
"""

import copy
import time
import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from unskew.calibration import parse_calibration
from unskew.calibration.classifier import (
    NEVER,
    CalibratedClassifier,
    Lift,
    Report,
    copy_head,
    device_of,
    last_linear,
)
from unskew.calibration.finisher import Finisher, Made, RealFeatures, StatisticsRequest
from unskew.calibration.protection import notes_on_noise
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError, a_kind, accepts
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.units import counted

MAX_CLASSES_NAMED = 10  # in a warning


@neutral()
@accepts
def calibrate(
    classifier: nn.Module, statistics: ClassStatistics, method: str | Finisher = "ccvr", seed: int = 0
) -> CalibratedClassifier:
    """Make a new classifier from class statistics alone; the old one does not change.

    Parameters
    ----------
    classifier
        An ``nn.Linear``, or a module that ends in one if the method's ``layers`` is above 1. Its input are the features
        of the statistics.
    statistics
        The sum of all clients' statistics.
    method
        A calibration such as ``"ccvr(per_class=500)"``, one from another package as ``"package.module:function(…)"``,
        or a Finisher.
    seed
        The seed of the calibration's random draws.

    Returns
    -------
    CalibratedClassifier
        A module to use instead of the classifier.
    """
    finisher = parse_calibration(method)
    needs = finisher.needs
    if isinstance(needs, RealFeatures):
        raise UserError(
            f"{finisher.text} needs the clients' real features, which only a simulation has; calibrate a simulated "
            "run with: unskew calibrate RUN"
        )
    if not isinstance(classifier, nn.Module):
        raise UserError(f"the classifier must be a torch module, not {a_kind(classifier)}")
    if needs.layers == 1 and isinstance(classifier, nn.Sequential) and len(classifier):
        *first, last = classifier  # in torchvision: Dropout, Linear
        if isinstance(last, nn.Linear) and all(isinstance(part, nn.Dropout | nn.Identity) for part in first):
            classifier = last  # dropout does nothing in eval mode
    if any(value.is_inference() for value in (*classifier.parameters(), *classifier.buffers())):
        classifier = copy.deepcopy(classifier)  # autograd refuses tensors from inference mode
    classes = _check_fit(classifier, statistics, needs)
    present = {label // needs.components for label in statistics.held.tolist()}
    absent = tuple(label for label in range(classes) if label not in present)
    began = time.perf_counter()
    result = _make(finisher, classifier, statistics.width, statistics, Key(seed).fold("calibrate"))
    if absent:
        labels = ", ".join(map(str, absent[:MAX_CLASSES_NAMED])) + (" …" if len(absent) > MAX_CLASSES_NAMED else "")
        linear = isinstance(result.head, nn.Linear)
        new = not _alike(result, classifier) or (linear and (needs.expand > 0 or not isinstance(classifier, nn.Linear)))
        fate = "is never predicted" if new else "keeps its row of the classifier"
        warnings.warn(f"no client has class {labels}: it {fate}", stacklevel=4)
    result = replace(result, notes=(*result.notes, *notes_on_noise(statistics)))
    before = Lift.of(statistics.width - needs.expand, needs.expand) if needs.expand else result.before
    return _wrap(finisher, result, before, absent, began, width=0 if _alike(result, classifier) else statistics.width)


@neutral()
def calibrate_on_features(
    classifier: nn.Module, features: Tensor, labels: Tensor, method: str | Finisher, seed: int = 0
) -> CalibratedClassifier:
    """Make a bound for study: a classifier from real features.

    Parameters
    ----------
    classifier, seed
        As in ``calibrate``.
    features, labels
        The clients' real features [n, d] and labels [n].
    method
        A calibration that needs real features, such as ``"oracle"``.
    """
    finisher = parse_calibration(method)
    if not isinstance(finisher.needs, RealFeatures):
        raise UserError(f"{finisher.text} works on class statistics, not on features; call unskew.calibrate")
    if not len(labels):
        raise UserError(f"{finisher.text}: there are no features to train on")
    absent = tuple(sorted(set(range(last_linear(classifier).out_features)) - set(labels.tolist())))
    began, width = time.perf_counter(), features.shape[1]
    result = _make(finisher, classifier, width, features, labels, Key(seed).fold("oracle"))
    return _wrap(finisher, result, result.before, absent, began, width=0 if _alike(result, classifier) else width)


def _make(finisher: Finisher, head: nn.Module, width: int, *inputs: object) -> Made:
    """Run the calibration, and check that its result can replace the head.

    A half-precision head is made in float32 and rounded at the end: SGD in half precision would not change it.
    """
    dtype = last_linear(head).weight.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    try:
        with torch.random.fork_rng(devices=[]):  # a new layer draws weights, which must not affect other draws
            result = finisher.make(copy.deepcopy(head).float() if half else head, *inputs)
    except UserError:
        raise
    except Exception as error:
        if str(getattr(finisher.make, "__module__", "")).startswith("unskew."):
            raise
        raise UserError(f"{finisher.text} failed: {type(error).__name__}: {error}") from error
    result = result if isinstance(result, Made) else Made(result)
    new, classes = result.head, last_linear(head).out_features
    if not isinstance(new, nn.Module):
        raise UserError(f"{finisher.text} returns {a_kind(new)}; it must return a module")
    if isinstance(new, nn.Linear) and new.bias is None:
        result = replace(result, head=copy_head(new))
    values = [*result.head.parameters(), *result.head.buffers()]
    if not all(bool(value.isfinite().all()) for value in values):
        raise UserError(f"{finisher.text} returns NaN or infinite weights")
    if half:
        never = torch.finfo(dtype).min
        with torch.no_grad():
            for value in values:
                value.masked_fill_(value <= NEVER, never)
                if value.is_floating_point() and not bool(value.to(dtype).isfinite().all()):
                    raise UserError(f"{finisher.text} needs weights beyond the range of {dtype}; use a float32 head")
        result.head.to(dtype)
    weight = last_linear(head).weight
    result.head.eval()
    try:
        with torch.no_grad():
            logits = result.head(torch.zeros(2, width, dtype=weight.dtype, device=weight.device))
    except Exception as error:
        raise UserError(
            f"{finisher.text} returns {a_kind(new)} that fails on {width} features of {weight.dtype}: {error}"
        ) from error
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (2, classes):
        shape = list(logits.shape) if isinstance(logits, Tensor) else a_kind(logits)
        raise UserError(
            f"{finisher.text} returns {a_kind(new)} that maps 2 examples to {shape}; "
            f"it must map {width} features to {classes} classes"
        )
    return result


def _alike(result: Made, head: nn.Module) -> bool:
    """Whether the values define the new head: a linear layer, or a copy of the head with other values."""
    shapes = [{name: value.shape for name, value in module.state_dict().items()} for module in (result.head, head)]
    kinds = [[type(part) for part in module.modules()] for module in (result.head, head)]
    return isinstance(result.head, nn.Linear) or (shapes[0] == shapes[1] and kinds[0] == kinds[1])


def _wrap(
    finisher: Finisher, result: Made, before: nn.Module, absent: tuple[int, ...], began: float, width: int
) -> CalibratedClassifier:
    losses, seconds = (result.loss_before, result.loss_after), time.perf_counter() - began
    report = Report(finisher.text, result.classes, absent, *losses, seconds, result.notes)
    before = before.to(device_of(result.head))
    return CalibratedClassifier(before, result.head, report, finisher.needs.layers, width=width)


def _check_fit(classifier: nn.Module, statistics: ClassStatistics, needs: StatisticsRequest) -> int:
    """The number of classes; a UserError unless classifier, statistics and calibration fit together."""
    if not isinstance(statistics, ClassStatistics):
        raise UserError(f"the statistics must be ClassStatistics, not {a_kind(statistics)}")
    if needs.layers == 1 and not isinstance(classifier, nn.Linear):
        raise UserError(
            f"the classifier must be an nn.Linear, not {a_kind(classifier)}; give its last layer and let the encoder "
            "end with the parts before it, or calibrate several linear layers with layers=…"
        )
    classes = last_linear(classifier).out_features
    layers = [part for part in classifier.modules() if isinstance(part, nn.Linear)]
    if len(layers) != needs.layers:
        raise UserError(f"layers={needs.layers}, but this classifier has {counted(len(layers), 'linear layer')}")
    wanted = (classes * needs.components, layers[0].in_features + needs.expand)
    if (statistics.classes, statistics.width) != wanted:
        hint = ""
        if needs.expand:
            hint = f"; with expand={needs.expand}, measure the output of unskew.Lift.of(features, {needs.expand})"
        elif needs.components > 1:
            hint = "; with components every component of a class has its own label, which unskew calibrate RUN assigns"
        raise UserError(
            f"the classifier maps {layers[0].in_features} features to {classes} classes and needs statistics of "
            f"{wanted[1]} features and {wanted[0]} classes, not {statistics.about()}{hint}"
        )
    if not len(statistics.held):
        raise UserError("the statistics are empty: no client has any examples")
    if not all(bool(value.isfinite().all()) for value in classifier.parameters()):
        raise UserError("the classifier contains NaN or infinity: its training diverged; use another one")
    return classes
