"""The registry of calibrations, and parsing a text such as ``ccvr(per_class=500)`` to a Finisher."""

from collections.abc import Callable

from unskew.calibration.ccvr import ccvr, uscc
from unskew.calibration.finisher import Finisher
from unskew.calibration.lda import lda, qda
from unskew.calibration.oracle import oracle
from unskew.calibration.ridge import ridge
from unskew.core import language
from unskew.core.errors import UserError, a_kind, nearest
from unskew.core.plugins import load_function, unknown_plugins

CALIBRATIONS: dict[str, Callable[..., Finisher]] = {
    build.__name__: build for build in (ccvr, uscc, lda, ridge, qda, oracle)
}


def parse_calibration(source: str | Finisher) -> Finisher:
    """Parse a calibration such as ``ccvr(per_class=500)``; a Finisher is returned unchanged.

    Calibrations from other packages are written ``package.module:function(…)``.
    """
    if isinstance(source, Finisher):
        return source
    if not isinstance(source, str):
        raise UserError(f"a calibration must be a text such as 'ccvr(per_class=500)' or a Finisher, not {source!r}")
    return _build(language.parse_call(source, "calibration"))


def is_bound(name: str) -> bool:
    """Whether a calibration in a result is a bound for study, which no federation could have.

    Protections may follow its name (``ccvr + secure``). False for one that cannot be parsed here, and for a plug-in
    that the user has never named: a result may come from anybody.
    """
    try:
        return not unknown_plugins(name) and _build(language.parse_calls(name, "calibration")[0]).bound
    except UserError:
        return False


def _build(call: language.Call) -> Finisher:
    build = load_function(call.name, "calibration") if ":" in call.name else CALIBRATIONS.get(call.name)
    if build is None:
        raise call.error(f"no calibration is called {call.name!r}; {nearest(call.name, CALIBRATIONS)}")
    finisher = language.apply(call, build, "calibration")
    if not isinstance(finisher, Finisher):
        raise call.error(f"{call.name} returns {a_kind(finisher)}; a calibration must return a Finisher")
    return finisher.named()
