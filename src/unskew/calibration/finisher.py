"""The Finisher record: a calibration as a value, with what it needs and how it makes a classifier.

A complete calibration, in a file of your own:

    @finisher
    def nearest_mean() -> Finisher:
        "Answers with the class whose mean is nearest: w_c = μ_c, b_c = −½·‖μ_c‖²."

        def make(head: nn.Linear, statistics: ClassStatistics, key: Key) -> nn.Linear:
            linear, means = copy.deepcopy(head), statistics.means().to(head.weight)
            with torch.no_grad():
                linear.weight[statistics.held] = means
                linear.bias[statistics.held] = -0.5 * means.square().sum(1)
            return linear

        return Finisher(make, StatisticsRequest(Diagonal()))
"""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import Lift, Transformation, device_of, limit_length
from unskew.calibration.covariances import ClassReport, Form, Full, parse_form
from unskew.core import text
from unskew.core.errors import UserError, a_kind
from unskew.models.cut import cut
from unskew.models.networks import Network


@dataclass(frozen=True)
class StatisticsRequest:
    """A question to every client; a job's name carries it as JSON."""

    form: Form = field(default_factory=Full)  # how much of each covariance
    layers: int = 1  # linear layers behind the features
    expand: int = 0  # random features beside them
    components: int = 1  # Gaussians a class; above 1, centres are sent along
    min_count: int = 0  # a class with fewer examples on a client is left out
    clip: float = 0.0  # the longest feature; 0: no limit

    def to_text(self) -> str:
        """What ``from_text`` takes."""
        return json.dumps(asdict(self) | {"form": str(self.form)})

    @staticmethod
    def from_text(source: str) -> "StatisticsRequest":
        """What ``to_text`` gave."""
        values = json.loads(source)
        return StatisticsRequest(**values | {"form": parse_form(values["form"])})

    def encoder(self, network: Network, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
        """Images to the features asked for, and how many these are."""
        first, _ = cut(network, self.layers)
        parts = [first]
        width = width_of(first, shape)
        if self.expand:
            parts.append(Lift.of(width, self.expand).to(device_of(first)))
            width += self.expand
        if self.clip:
            parts.append(_Clip(self.clip))
        return nn.Sequential(*parts), width


def width_of(encoder: nn.Module, shape: tuple[int, ...]) -> int:
    """How many features the encoder gives for images of this shape."""
    part = next(encoder.parameters(), torch.zeros(0))
    training = encoder.training
    with torch.no_grad():
        features: Tensor = encoder.eval()(torch.zeros(1, *shape, dtype=part.dtype, device=device_of(encoder)))
    encoder.train(training)
    return features.shape[1]


class _Clip(nn.Module):
    """Features on the CPU, no longer than the radius: lengths are float64, which not every device has."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, features: Tensor) -> Tensor:
        return limit_length(features.cpu(), self.radius)


Knobs = ParamSpec("Knobs")


@dataclass(frozen=True)
class RealFeatures:
    """What a bound for study needs: the clients' real features, which only a simulation has."""

    layers: int = 1  # linear layers behind the features
    per_class: int = 0  # features of each class; 0: all


@dataclass(frozen=True, eq=False)
class Made:
    """A new classifier, and what there is to report of it."""

    head: nn.Module
    loss_before: float = float("nan")
    loss_after: float = float("nan")
    classes: tuple[ClassReport, ...] = ()
    before: Transformation = field(default_factory=Transformation)  # what features pass first
    notes: tuple[str, ...] = ()  # what a user must know of it, in words


@dataclass(frozen=True)
class Finisher:
    """A calibration: after the last round it makes a new classifier.

    ``make(head, statistics, key)`` gives an ``nn.Linear``, or a copy of ``head`` with other values, or ``Made`` with
    more to report. ``head`` is the classifier as trained and must be left as it is; ``statistics`` are what ``needs``
    asks for, summed over all clients. With ``RealFeatures`` it is ``make(head, features, labels, key)``.

    A Finisher is a method too: applied to an algorithm, it adds itself to the ``finish`` slot.
    """

    make: Callable[..., Made | nn.Module]
    needs: StatisticsRequest | RealFeatures = field(default_factory=StatisticsRequest)
    bound: bool = False  # a bound for study: it sees what no server may see
    virtual: int = 0  # features that it draws for each class: refused before the first round if memory lacks
    bends: bool = False  # features pass a transformation before its classifier
    text: str = ""  # its plainest spelling, which is its name in results; @finisher fills it in

    def __call__(self, algorithm: Any) -> Any:
        """The algorithm with this calibration after those that it has."""
        return replace(algorithm, finish=(*algorithm.finish, self.named()))

    def named(self) -> "Finisher":
        """This calibration, if it has a name; results are filed under it."""
        if not self.text:
            raise UserError("this calibration has no name; put @finisher above its function, or give Finisher a text")
        return self


def finisher(build: Callable[Knobs, Finisher]) -> Callable[Knobs, Finisher]:
    """Decorates a function from knobs to a Finisher: its text becomes the function's name and the knobs given.

    Knobs at their defaults are left out. A function outside this package is named ``package.module:function``.
    """
    ours = build.__module__.startswith("unskew.calibration.") or build.__module__ == "__main__"
    name = build.__name__ if ours else f"{build.__module__}:{build.__qualname__}"

    @functools.wraps(build)
    def spelled(*values: Knobs.args, **knobs: Knobs.kwargs) -> Finisher:
        made = build(*values, **knobs)
        if not isinstance(made, Finisher):
            raise UserError(f"{name} gives {a_kind(made)}; a calibration must give a Finisher")
        signature = inspect.signature(build)
        given = signature.bind(*values, **knobs).arguments
        other = {knob: value for knob, value in given.items() if value != signature.parameters[knob].default}
        return replace(made, text=str(text.Call(name, (), other, 0, "")))

    return spelled
