"""Calibration: the table of calibrations, and the way from a text such as ``ccvr(per_class=500)`` to a Finisher."""

from collections.abc import Callable

from unskew.calibration.ccvr import ccvr, uscc
from unskew.calibration.finisher import Finisher
from unskew.calibration.lda import lda
from unskew.calibration.oracle import oracle
from unskew.calibration.qda import qda
from unskew.calibration.ridge import ridge
from unskew.core import text
from unskew.core.errors import UserError, a_kind, nearest
from unskew.core.plugins import load_function
from unskew.core.trust import unknown_plugins

CALIBRATIONS: dict[str, Callable[..., Finisher]] = {
    "ccvr": ccvr,
    "uscc": uscc,
    "lda": lda,
    "ridge": ridge,
    "qda": qda,
    "oracle": oracle,
}


def parse_calibration(source: str | Finisher) -> Finisher:
    """The calibration of a text such as ``ccvr(per_class=500)``, or the value itself.

    Calibrations of other packages are written ``package.module:function(…)``.
    """
    if isinstance(source, Finisher):
        return source
    if not isinstance(source, str):
        raise UserError(f"a calibration must be a text such as 'ccvr(per_class=500)' or a Finisher, not {source!r}")
    calls = text.parse_calls(source, "calibration")
    if len(calls) > 1:
        raise text.complain(
            source,
            calls[1].start,
            "give a single calibration; adding methods or protections with + works only in a run's method",
        )
    return _build(calls[0])


def is_bound(name: str) -> bool:
    """Whether the calibration of that name in a result is a bound for study, which no federation could have.

    What protects its statistics may follow (``ccvr + secure``). A calibration that cannot be read here is not one, nor
    is a plug-in that the user has never named: a result may come from anybody.
    """
    if unknown_plugins(name):
        return False
    try:
        return _build(text.parse_calls(name, "calibration")[0]).bound
    except UserError:
        return False


def _build(call: text.Call) -> Finisher:
    build = load_function(call.name, "calibration") if ":" in call.name else CALIBRATIONS.get(call.name)
    if build is None:
        hint = nearest(call.name, CALIBRATIONS)
        raise text.complain(call.source, call.start, f"no calibration is called {call.name!r}; {hint}")
    made = text.apply(call, build, "calibration")
    if not isinstance(made, Finisher):
        message = f"{call.name} returns {a_kind(made)}; a calibration must return a Finisher"
        raise text.complain(call.source, call.start, message)
    return made.named()
