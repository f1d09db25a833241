"""Where results that can be made again are kept between runs."""

import os
from pathlib import Path

from unskew.core.limits import usable_path, user_path

VARIABLE = "UNSKEW_CACHE"


def cache_folder(given: str | None = None) -> Path:
    """The folder given with --cache-dir, or that UNSKEW_CACHE names, or ~/.cache/unskew; it need not be there yet."""
    return usable_path(user_path(given or os.environ.get(VARIABLE) or "~/.cache/unskew")).absolute()
