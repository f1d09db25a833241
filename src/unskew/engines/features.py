"""The output of a frozen part for every image, computed once and cached.

The fingerprint covers the images, the frozen weights, the cut, the shape, the normalization and the views. Each block
of images is a file with a checksum: interrupted work continues, and a damaged file is computed again. The output does
not depend on the number of cores.
"""

import copy
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.files import CACHE_VARIABLE, write_whole
from unskew.core.key import Key
from unskew.core.machine import cores, ready_device
from unskew.core.types import ImageSet, Split, Tensors
from unskew.core.units import format_bytes
from unskew.data.batches import SHIFT, Pixels, draw_augmentation
from unskew.data.photographs import Say
from unskew.data.population import Population
from unskew.engines.blueprint import Blueprint, dataset, pixels
from unskew.models.finetune import Cut, find_cut

BLOCK = 1024  # images in a file
AT_ONCE = 32  # images in one pass, which should fit in a core's cache
FORMAT, ABOUT = "unskew features 1", "unskew"
OTHER_FOLDER = f"set --cache-dir or {CACHE_VARIABLE} to a folder on another disk"

Floats = npt.NDArray[np.float32]


class FrozenPart:
    """A network's frozen part, and the images that it runs on, ``views`` times more for the training images."""

    def __init__(
        self, blueprint: Blueprint, weights: Tensors, images: ImageSet, population: Population, sha256: str, views: int
    ) -> None:
        self.blueprint, self.images, self.images_sha256, self.views = blueprint, images, sha256, views
        self.network = blueprint.whole()
        tensors.overwrite_some(self.network, weights)
        self.parts = pixels(blueprint, dataset(images, population))
        cut = find_cut(self.network, blueprint.shape, blueprint.layers or 0)
        assert cut is not None  # otherwise nothing is stored
        self.cut, self.bytes = cut, stored_bytes(images, cut.shape, views)

    def fingerprint(self) -> str:
        """A hash of everything that decides the output."""
        facts = [FORMAT, self.images_sha256, str(self.blueprint.shape), str(self.cut.shape), str(self.views)]
        if self.views and (kind := self.blueprint.local.augmentation) != SHIFT:
            facts.append(f"{kind} 2")  # increase the number if the same draws give other views
        own = {id(value) for value in self.network.classifier.parameters()}  # may be part of ``encoder``
        front = {**dict(self.cut.front.named_parameters()), **dict(self.cut.front.named_buffers())}
        facts.append(tensors.sha256({name: value for name, value in front.items() if id(value) not in own}))
        facts += [str(value.flatten().tolist()) for value in (self.parts["train"].scale, self.parts["train"].offset)]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def output(self, cache: Path, say: Say) -> ImageSet:
        """The image set with the frozen part's output instead of its images, from the cache or computed now."""
        images, views, fingerprint = self.images, self.views, self.fingerprint()
        folder = cache / f"features-{fingerprint[:32]}"
        activity = f"features of the frozen part: {format_bytes(self.bytes)} in {folder}"
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if existing != folder and self.bytes > (free := shutil.disk_usage(existing).free):
            raise UserError(f"{activity}, but only {format_bytes(free)} is free; {OTHER_FOLDER}")
        total = len(images.train) * (1 + views) + (len(images.test) if images.test.rows is None else 0)
        done, parts = 0, dict[str, Floats]()
        with _locked(folder), _encoder(self.cut, self.blueprint) as fill:
            for part, split in (("train", images.train), ("test", images.test)):
                if split.rows is not None:  # a validation split
                    parts[part] = parts["train"]
                    continue
                per_image = 1 + (views if part == "train" else 0)
                features: Floats = np.empty((len(split) * per_image, *self.cut.shape), np.float32)
                for start in range(0, len(split), BLOCK):
                    stop = min(start + BLOCK, len(split))
                    file = folder / f"{part}-{start:09d}.safetensors"
                    rows = features[start * per_image : stop * per_image]
                    if not _read(file, fingerprint, rows):
                        say(activity, done, total)
                        fill(rows, self.parts[part], start, per_image)
                        _write(file, fingerprint, rows)
                    done += len(rows)
                parts[part] = features
        train = Split(parts["train"], images.train.labels)
        test = Split(parts["test"], images.test.labels, images.test.rows)
        return replace(images, train=train, test=test)


def stored_bytes(images: ImageSet, shape: tuple[int, int, int], views: int) -> int:
    """The size of the stored output, in memory and on disk."""
    own = len(images.test) if images.test.rows is None else 0  # a validation split is part of the training images
    return 4 * shape[0] * shape[1] * shape[2] * (len(images.train) * (1 + views) + own)


def images_sha256(images: ImageSet) -> str:
    """SHA-256 of the images and labels of train and test."""
    digest = hashlib.sha256()
    for part in (images.train, images.test):
        digest.update(repr(part.images.shape).encode())
        if isinstance(part.images, np.ndarray):
            digest.update(np.ascontiguousarray(part.images).data)
        else:
            digest.update(part.images.sha256.encode())
        digest.update(np.ascontiguousarray(part.labels).data)
    return digest.hexdigest()


Fill = Callable[[Floats, Pixels, int, int], None]


@contextmanager
def _encoder(cut: Cut, blueprint: Blueprint) -> Iterator[Fill]:
    """A function that runs the frozen part on every core, with a copy for each thread.

    It computes the rows of the examples from ``start`` on: for each, the plain image, then its views. Batches do not
    depend on the number of cores.
    """
    device, own = ready_device(blueprint.device), threading.local()

    def prepare() -> None:
        torch.set_num_threads(1)
        front = copy.deepcopy(cut.front).eval().to(device)
        own.front = front.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def encode(rows: Floats, pixels: Pixels, start: int, view: int) -> None:
        index = torch.arange(start, start + len(rows))
        chosen = list[Tensor]()
        if view:  # the same for every seed, so that seeds share the stored views
            draws = Key(0).fold("views", view).numpy()
            drawn = draw_augmentation(blueprint.local.augmentation, draws, len(pixels.labels))
            chosen = [values[index] for values in drawn]
        images = pixels.batch(index, *chosen)[0].to(device, memory_format=torch.channels_last)
        with torch.no_grad():
            output: Tensor = own.front(images)
        rows[:] = output.float().cpu().reshape(rows.shape).numpy()

    threads = ThreadPoolExecutor(cores() if device.type == "cpu" else 1, "features", prepare)

    def fill(rows: Floats, pixels: Pixels, start: int, per_image: int) -> None:
        shaped = rows.reshape(-1, per_image, *rows.shape[1:])
        work = [
            threads.submit(encode, shaped[first : first + AT_ONCE, view], pixels, start + first, view)
            for view in range(per_image)
            for first in range(0, len(shaped), AT_ONCE)
        ]
        for part in work:
            part.result()

    try:
        yield fill
    finally:
        threads.shutdown(cancel_futures=True)


def _write(file: Path, fingerprint: str, rows: Floats) -> None:
    about = f"{fingerprint} {hashlib.sha256(rows.data).hexdigest()}"  # one entry, because several have no fixed order
    write_whole(file, save({"features": torch.from_numpy(rows)}, metadata={ABOUT: about}))


def _read(file: Path, fingerprint: str, rows: Floats) -> bool:
    """Fill the rows from the file, if it exists, is undamaged and has this fingerprint."""
    try:
        with safe_open(file, "numpy") as content:
            about, features = (content.metadata() or {}).get(ABOUT, ""), content.get_tensor("features")
    except (OSError, SafetensorError, ValueError, KeyError):
        return False
    expected = f"{fingerprint} {hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()}"
    if features.shape != rows.shape or features.dtype != np.float32 or about != expected:
        return False
    rows[:] = features
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time compute these features; others wait, and then read them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock").acquire()
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; {OTHER_FOLDER}") from error
    with lock:
        yield
