"""Reads the data set that a configuration names, also where a user's own has moved to."""

from dataclasses import replace
from pathlib import Path

from unskew.core.types import Examples, ImageSet
from unskew.data.scan import Say
from unskew.data.sources import load, load_examples, moved
from unskew.data.store import Cache
from unskew.data.tables import cache_of, silent
from unskew.runs.config import Config


def read_data(config: Config, say: Say = silent) -> ImageSet:
    """The data set that a configuration names."""
    folder = Path(config.data_dir) if config.data_dir else None
    if (place := moved(config.data, folder)) == config.data:
        return load(config.data, folder, cache_settings(config), say)
    images = load(place, folder, cache_settings(config), say)
    note = f"{config.data.partition(':')[2]} is not there any more, and is read from {folder}"
    return replace(images, name=config.data, notes=(*images.notes, note))


def read_examples(config: Config, say: Say = silent) -> Examples:
    """The training examples of that data set: photographs are not read unless that is needed."""
    return load_examples(config.data, Path(config.data_dir) if config.data_dir else None, cache_settings(config), say)


def cache_settings(config: Config) -> Cache:
    """Where decoded photographs are kept, and what they may take."""
    return cache_of(config.cache_dir, config.cache_disk, config.cache_memory)
