"""The Finisher record: a calibration as a value, with what it needs and how it makes a classifier.

docs/how-to/extending.md has a complete calibration in a file of its own.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ParamSpec

from torch import Tensor, nn

from unskew.calibration.classifier import Lift, Transformation, limit_length
from unskew.calibration.covariances import ClassReport, Form, Full, parse_form
from unskew.core import language
from unskew.core.errors import UserError, a_kind
from unskew.models.cut import cut, width_of
from unskew.models.networks import InParts, Network, device_of


@dataclass(frozen=True)
class StatisticsRequest:
    """The statistics that a calibration needs from every client.

    Parameters
    ----------
    form
        How much of each covariance: Full, Diagonal, Shared or LowRank.
    layers
        The number of linear layers after the features.
    expand
        The number of additional random features.
    components
        Gaussians per class. Above 1, their centers are sent to the clients.
    min_count
        Classes with fewer examples on a client are left out.
    clip
        The length that features are clipped to. 0: no limit.
    """

    form: Form = field(default_factory=Full)
    layers: int = 1
    expand: int = 0
    components: int = 1
    min_count: int = 0
    clip: float = 0.0

    def to_plain(self) -> dict[str, int | float | str]:
        """The request as values for JSON."""
        return asdict(self) | {"form": str(self.form)}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> "StatisticsRequest":
        """The inverse of ``to_plain``."""
        return StatisticsRequest(**{**values, "form": parse_form(values["form"])})

    def encoder(self, network: Network, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
        """A module from images to the requested features, and their number."""
        first, _ = cut(network, self.layers)
        parts: list[nn.Module] = [InParts(first)]
        width = width_of(first, shape)
        if self.expand:
            parts.append(Lift.of(width, self.expand).to(device_of(first)))
            width += self.expand
        if self.clip:
            parts.append(_Clip(self.clip))
        return nn.Sequential(*parts), width


class _Clip(nn.Module):
    """Clips features to the radius, on the CPU: lengths are float64, which not every device supports."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, features: Tensor) -> Tensor:
        return limit_length(features.cpu(), self.radius)


Knobs = ParamSpec("Knobs")


@dataclass(frozen=True)
class RealFeatures:
    """The clients' real features, for a bound for study: only a simulation has them.

    Parameters
    ----------
    layers
        The number of linear layers after the features.
    per_class
        The number of features per class. 0: all.
    """

    layers: int = 1
    per_class: int = 0


@dataclass(frozen=True, eq=False)
class Made:
    """A new classifier with more to report.

    Parameters
    ----------
    head
        The classifier: an ``nn.Linear``, or a copy of the trained head with other values.
    loss_before, loss_after
        The mean loss on the features that it was made from.
    classes
        A report for each class.
    before
        The transformation of features before the head.
    notes
        What the user should know, in sentences.
    """

    head: nn.Module
    loss_before: float = float("nan")
    loss_after: float = float("nan")
    classes: tuple[ClassReport, ...] = ()
    before: Transformation = field(default_factory=Transformation)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finisher:
    """A calibration: it makes a new classifier after the last round.

    A Finisher is a method too: applied to an algorithm, it adds itself to the ``finish`` slot.

    Parameters
    ----------
    make
        ``make(head, statistics, key)`` returns an ``nn.Linear``, a copy of ``head`` with other values, or ``Made`` with
        more to report. ``head`` is the trained classifier, which must not be modified; ``statistics`` are those that
        ``needs`` requests, summed over all clients. With ``RealFeatures`` it is ``make(head, features, labels, key)``.
    needs
        What it is made from.
    bound
        Whether it is a bound for study, which uses what no server may see.
    virtual
        The number of features that it draws per class; too many are rejected before the first round.
    bends
        Whether features are transformed before its classifier.
    text
        Its shortest spelling, which is its name in results. ``@finisher`` fills it in.
    """

    make: Callable[..., Made | nn.Module]
    needs: StatisticsRequest | RealFeatures = field(default_factory=StatisticsRequest)
    bound: bool = False
    virtual: int = 0
    bends: bool = False
    text: str = ""

    def __call__(self, algorithm: Any) -> Any:
        """Append this calibration to an algorithm's."""
        return replace(algorithm, finish=(*algorithm.finish, self.named()))

    def named(self) -> "Finisher":
        """This calibration, if it has a name for results; otherwise a UserError."""
        if not self.text:
            raise UserError("a calibration has no name; decorate its function with @finisher, or give Finisher a text")
        return self


def finisher(build: Callable[Knobs, Finisher]) -> Callable[Knobs, Finisher]:
    """Decorate a function from knobs to a Finisher; the text becomes the function's name and its arguments.

    Parameters
    ----------
    build
        The function. One from another package is named ``package.module:function``. Knobs at their defaults are left
        out of the text.
    """
    ours = build.__module__.startswith("unskew.calibration.") or build.__module__ == "__main__"
    name = build.__name__ if ours else f"{build.__module__}:{build.__qualname__}"

    @functools.wraps(build)
    def spelled(*values: Knobs.args, **knobs: Knobs.kwargs) -> Finisher:
        result = build(*values, **knobs)
        if not isinstance(result, Finisher):
            raise UserError(f"{name} returns {a_kind(result)}; a calibration must return a Finisher")
        signature = inspect.signature(build)
        arguments = signature.bind(*values, **knobs).arguments
        other = {knob: value for knob, value in arguments.items() if value != signature.parameters[knob].default}
        return replace(result, text=str(language.Call(name, (), other, 0, "")))

    return spelled
