"""Arrays from Python as an image set."""

from typing import Any

import numpy as np

from unskew.core.errors import UserError
from unskew.core.types import ImageSet, Split
from unskew.data.folders import measure


def image_set_from(value: Any, name: str = "arrays") -> ImageSet:
    """An ImageSet as it is, or (x_train, y_train, x_test, y_test) as a tuple or a dict of byte images [N, ch, H, W]."""
    if isinstance(value, ImageSet):
        return value
    if isinstance(value, dict):
        value = tuple(value.get(key) for key in ("x_train", "y_train", "x_test", "y_test"))
    if not isinstance(value, tuple) or len(value) != 4 or any(each is None for each in value):
        raise UserError("data: give an ImageSet or the arrays x_train, y_train, x_test, y_test")
    x_train, y_train, x_test, y_test = map(np.asarray, value)
    train, test = Split(x_train, y_train.astype(np.int64)), Split(x_test, y_test.astype(np.int64))
    classes = tuple(str(each) for each in range(int(max(train.labels.max(), test.labels.max())) + 1))
    return ImageSet(name, classes, train, test, *measure(x_train))
