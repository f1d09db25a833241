"""``timm:NAME``: any network of the timm package, without weights; ``--pretrained FILE`` gives it some."""

from collections.abc import Callable

from torch import nn

from unskew.core.errors import UserError, nearest
from unskew.core.plugins import require_extra
from unskew.core.text import parse_call
from unskew.models.networks import Shape

PREFIX = "timm:"


def bind_timm(text: str, shape: Shape, classes: int) -> Callable[[], nn.Module]:
    """A call that makes the network of this text, such as ``timm:vit_tiny_patch16_224(img_size=32)``."""
    timm = require_extra("timm", "timm")
    call = parse_call(text.removeprefix(PREFIX), "model")
    if call.values or "pretrained" in call.knobs:
        raise UserError(f"{text}: give knobs by name, and weights with --pretrained FILE")
    if not timm.is_model(call.name):
        raise UserError(f"{text}: timm has no such network; {nearest(call.name, timm.list_models())}")
    return lambda: timm.create_model(call.name, num_classes=classes, in_chans=shape[0], **call.knobs)
