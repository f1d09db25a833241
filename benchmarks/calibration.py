"""What calibration costs: statistics beside a forward pass, re-training, and the size of a real-world label set."""

import json
import subprocess
import sys
import time

import torch

import unskew
from measure import Row, at_least, at_most, medians, peak_memory
from unskew import models
from unskew.calibration.covariances import Full, check_memory, pack, parse_form, statistics_bytes
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.tensors import one_thread
from unskew.data.batches import Pixels
from unskew.engines.blueprint import keep_freed_memory
from unskew.models.networks import InParts

IMAGES = 10_000
LARGE = [  # C = 1,203, d = 1,280 (iNaturalist's classes, MobileNet's features): form, calibration, GB, seconds
    ("shared", "lda", 1.0, 120.0),
    ("shared", "ridge", 1.0, 120.0),
    ("low-rank(32)", "ccvr(per_class=10, epochs=2)", 4.0, None),
]
CLASSES, WIDTH, CLIENTS, EACH = 1203, 1280, 1000, 100


def suite(images, repeats):
    """All rows."""
    # the parts last: a child process inherits the peak of its parent's memory
    return [*_measuring(images, repeats), *_retraining(images, repeats), *_large(), _refusal(), *_parts(images)]


def _measuring(images, repeats):
    """One pass with statistics against one without, both on one thread."""
    network = models.build("simple-cnn", images.shape, len(images.classes)).eval()
    pixels = Pixels.of(
        torch.from_numpy(images.train.images), torch.from_numpy(images.train.labels),
        torch.tensor(images.mean), torch.tensor(images.std), torch.float32,
    )  # fmt: skip

    def batches():
        return (pixels.batch(index) for index in torch.arange(IMAGES).split(500))

    def forward():
        with one_thread(), torch.no_grad():
            for inputs, _ in batches():
                network.encoder(inputs)

    def measured(form):
        def work():
            with one_thread():
                ClassStatistics.measure(network.encoder, batches(), len(images.classes), form=form)

        return work

    forms = ("full", "diagonal", "shared", "low-rank(32)")
    variants = {"forward": forward} | {form: measured(form) for form in forms}
    seconds = medians(variants, repeats, time.process_time)  # one thread: other programs do not count
    base = seconds["forward"]
    return [
        Row("a forward pass over 10,000 images", base, "s", remark="simple-cnn, 256 features, 10 classes, 1 thread"),
        at_most("measuring full statistics / that pass", seconds["full"] / base, "", 1.15),
        *(Row(f"measuring {form} statistics / that pass", seconds[form] / base, "") for form in forms[1:]),
        *(
            Row(f"{form} statistics that a client sends", statistics_bytes(parse_form(form), 10, 256) / 1e6, "MB")
            for form in forms
        ),
        Row("packing a triangle of 256 features / its product", *_packing(repeats), remark="500 examples"),
    ]


def _parts(images):
    """500 images through a large network in parts of 50, and all at once."""
    keep_freed_memory()  # as every engine does
    network = models.build("mobilenet-v2", images.shape, len(images.classes)).eval()
    pixels = torch.randn(500, *images.shape, generator=Key(0).torch())
    parts = InParts(network.encoder)
    with one_thread(), torch.no_grad():
        seconds = medians({"parts": lambda: parts(pixels), "whole": lambda: network.encoder(pixels)}, 3)
    ratio = seconds["whole"] / seconds["parts"]
    return [at_least("features of 500 images, 50 at a time / all at once", ratio, "", 1.2, "mobilenet-v2, 1 thread")]


def _packing(repeats):
    features = torch.randn(500, 256, generator=Key(0).torch(), dtype=torch.float64)
    square = features.t() @ features
    with one_thread():
        variants = {"product": lambda: features.t() @ features, "pack": lambda: pack(square)}
        seconds = medians({name: lambda work=work: [work() for _ in range(100)] for name, work in variants.items()},
                          repeats, time.process_time)  # fmt: skip
    return seconds["pack"] / seconds["product"], ""


def _retraining(images, repeats):
    """From statistics to a classifier, CIFAR-10's simple-cnn."""
    network = models.build("simple-cnn", images.shape, 10)
    models.initialise(network, Key(0))
    labels = torch.arange(5000) % 10
    features = torch.randn(5000, 256, generator=Key(1).torch()) + labels[:, None] * 0.1
    full = ClassStatistics.of_features(features, labels, 10)
    shared = ClassStatistics.of_features(features, labels, 10, "shared")
    seconds = medians(
        {
            "ccvr": lambda: unskew.calibrate(network.classifier, full, "ccvr"),
            "lda": lambda: unskew.calibrate(network.classifier, shared, "lda"),
            "ridge": lambda: unskew.calibrate(network.classifier, shared, "ridge"),
            "qda": lambda: unskew.calibrate(network.classifier, full, "qda"),
        },
        min(repeats, 3),
    )
    return [
        at_most("ccvr, 2000 features a class, 10 classes", seconds["ccvr"], "s", 5.0, "10 epochs, batch 64"),
        Row("lda, the same statistics' size", 1000 * seconds["lda"], "ms"),
        Row("ridge, the same statistics' size", 1000 * seconds["ridge"], "ms"),
        Row("qda, full statistics of that size", 1000 * seconds["qda"], "ms"),
    ]


def _large():
    rows = []
    for form, method, most, limit in LARGE:
        said = subprocess.run([sys.executable, __file__, form, method], capture_output=True, text=True, check=True)
        measured = json.loads(said.stdout)
        name = f"{CLASSES:,} classes, {WIDTH:,} features, {CLIENTS:,} clients of {EACH}: {form}, {method}"
        rows.append(at_most(f"{name}: memory", measured["gb"], "GB", most, "the whole process"))
        time_row = f"{name}: time"
        rows.append(Row(time_row, measured["seconds"], "s") if limit is None else
                    at_most(time_row, measured["seconds"], "s", limit, "features to classifier"))  # fmt: skip
    return rows


def _refusal():
    """``full`` statistics of that size say beforehand what they would take."""
    needed = statistics_bytes(Full(), CLASSES, WIDTH) / 1e9
    try:
        check_memory(Full(), CLASSES, WIDTH)
    except UserError as error:
        return Row("full statistics of that size", needed, "GB", remark=f"refused beforehand: {error}")
    return Row("full statistics of that size", needed, "GB", remark="fit on this machine")


def _one_large(form, method):
    """In a separate process: features drawn client by client, statistics merged, the classifier made."""
    means = torch.randn(CLASSES, WIDTH, generator=Key(0).torch())
    classifier = torch.nn.Linear(WIDTH, CLASSES)

    def client(number):
        generator = Key(1).fold("client", number).torch()
        labels = torch.randint(CLASSES, (EACH,), generator=generator)
        features = means[labels] + torch.randn(EACH, WIDTH, generator=generator)
        return ClassStatistics.of_features(features, labels, CLASSES, form)

    began = time.perf_counter()
    total = ClassStatistics.merged(client(number) for number in range(CLIENTS))
    unskew.calibrate(classifier, total, method)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "gb": peak_memory() / 1e9}))


if __name__ == "__main__":
    _one_large(*sys.argv[1:])
