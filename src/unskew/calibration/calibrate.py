"""From class statistics to a calibrated classifier: runs a calibration, and checks its input and output.

Shapes: n features of d dimensions.
"""

import copy
import time
import warnings

import torch
from torch import Tensor, nn

from unskew.calibration import parse_calibration
from unskew.calibration.classifier import NEVER, CalibratedClassifier, Lift, Report, copy_head, last_linear
from unskew.calibration.finisher import Finisher, Made, RealFeatures, StatisticsRequest
from unskew.calibration.protection import notes_on_noise
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError, a_kind, accepts
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.units import counted
from unskew.models.networks import device_of


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
    if needs.layers == 1 and isinstance(classifier, nn.Sequential) and len(classifier):
        *first, last = classifier  # in torchvision: Dropout, Linear
        if isinstance(last, nn.Linear) and all(isinstance(part, nn.Dropout | nn.Identity) for part in first):
            classifier = last  # dropout does nothing in eval mode
    classes = _check_fit(classifier, statistics, needs)
    if any(value.is_inference() for value in (*classifier.parameters(), *classifier.buffers())):
        classifier = copy.deepcopy(classifier)  # autograd refuses tensors from inference mode
    present = {label // needs.components for label in statistics.held.tolist()}
    absent = tuple(label for label in range(classes) if label not in present)
    if absent:
        labels = ", ".join(map(str, absent[:10])) + (" …" if len(absent) > 10 else "")
        fate = "it keeps its row of the classifier, or is never predicted by a new one"
        warnings.warn(f"no client has class {labels}: {fate}", stacklevel=4)
    lift = Lift.of(statistics.width - needs.expand, needs.expand) if needs.expand else None
    notes, key = notes_on_noise(statistics), Key(seed).fold("calibrate")
    return _make(finisher, classifier, statistics.width, absent, statistics, key, lift=lift, notes=notes)


@neutral()
def calibrate_on_features(
    classifier: nn.Module, features: Tensor, labels: Tensor, method: str | Finisher, seed: int = 0
) -> CalibratedClassifier:
    """Make a bound for study: a classifier from the clients' real features [n, d] and labels [n]."""
    finisher = parse_calibration(method)
    absent = tuple(sorted(set(range(last_linear(classifier).out_features)) - set(labels.tolist())))
    return _make(finisher, classifier, features.shape[1], absent, features, labels, Key(seed).fold("oracle"))


def _make(
    finisher: Finisher,
    head: nn.Module,
    width: int,
    absent: tuple[int, ...],
    *inputs: object,
    lift: Lift | None = None,
    notes: tuple[str, ...] = (),
) -> CalibratedClassifier:
    """Run the calibration, and check that its result can replace the head.

    A half-precision head is made in float32 and rounded at the end: SGD in half precision would not change it.
    """
    began, weight, classes = time.perf_counter(), last_linear(head).weight, last_linear(head).out_features
    half = weight.dtype in (torch.float16, torch.bfloat16)
    try:
        with torch.random.fork_rng(devices=[]):  # a new layer draws weights, which must not affect other draws
            result = finisher.make(copy.deepcopy(head).float() if half else head, *inputs)
        made = result if isinstance(result, Made) else Made(result)
        new = copy_head(made.head) if isinstance(made.head, nn.Linear) and made.head.bias is None else made.head
        new.eval()
        with torch.no_grad():
            if half:
                for value in (*new.parameters(), *new.buffers()):
                    value.masked_fill_(value <= NEVER, torch.finfo(weight.dtype).min)
                new.to(weight.dtype)
            logits = new(torch.zeros(2, width, dtype=weight.dtype, device=weight.device))
        if tuple(logits.shape) != (2, classes):
            raise ValueError(f"{a_kind(new)} maps 2 examples to {list(logits.shape)}")
    except UserError:
        raise
    except Exception as error:
        if str(getattr(finisher.make, "__module__", "")).startswith("unskew."):
            raise
        wanted = f"it must return a module that maps {width} features to {classes} classes"
        raise UserError(f"{finisher.text} failed: {type(error).__name__}: {error}; {wanted}") from error
    if not all(bool(value.isfinite().all()) for value in (*new.parameters(), *new.buffers())):
        raise UserError(f"{finisher.text} returns NaN or infinite weights in {weight.dtype}")
    # the values alone define a linear layer, and a copy of the head with other values; other heads are saved as graphs
    shapes = [{name: value.shape for name, value in module.state_dict().items()} for module in (new, head)]
    kinds = [[type(part) for part in module.modules()] for module in (new, head)]
    alike = isinstance(new, nn.Linear) or (shapes[0] == shapes[1] and kinds[0] == kinds[1])
    losses, seconds = (made.loss_before, made.loss_after), time.perf_counter() - began
    report = Report(finisher.text, made.classes, absent, *losses, seconds, (*made.notes, *notes))
    before = (lift or made.before).to(device_of(new))
    return CalibratedClassifier(before, new, report, finisher.needs.layers, width=0 if alike else width)


def _check_fit(classifier: nn.Module, statistics: ClassStatistics, needs: StatisticsRequest) -> int:
    """The number of classes; a UserError unless classifier, statistics and calibration fit together."""
    if not isinstance(classifier, nn.Module) or not isinstance(statistics, ClassStatistics):
        given = f"{a_kind(classifier)} and {a_kind(statistics)}"
        raise UserError(f"calibrate takes a torch module and ClassStatistics, not {given}")
    layers = [part for part in classifier.modules() if isinstance(part, nn.Linear)]
    if len(layers) != needs.layers or (needs.layers == 1 and not isinstance(classifier, nn.Linear)):
        rule = "an nn.Linear" if needs.layers == 1 else f"a module with {needs.layers} linear layers"
        given = f"{a_kind(classifier)} with {counted(len(layers), 'linear layer')}"
        hint = "end the encoder just before the classifier's first linear layer"
        raise UserError(f"the classifier must be {rule}, not {given}; {hint}")
    classes = layers[-1].out_features
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
    if not all(bool(value.detach().isfinite().all()) for value in classifier.parameters()):
        raise UserError("the classifier contains NaN or infinity: its training diverged; use another one")
    return classes
