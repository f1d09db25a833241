"""Published sets at full size, generated in their public layout: CINIC-10, iNaturalist-2017, Google Landmarks v2.

    python benchmarks/published.py DIR        # writes all three, about 2.5 million links to a few small pictures

Annotations, numbers of files, classes and users are as large as the real ones. The pictures are not: hard links to 64
small files. ``unskew data check`` and ``unskew run`` then work on DIR as on the real files.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from measure import at_most
from population import WHOLE
from unskew.data.synthetic_set import draw_rows

CINIC = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
LANDMARKS, CLEAN, ALL = 81_313, 1_580_470, 4_132_914  # landmarks and images of the cleaned part; images in all
AUTHORS = 600_000  # with these sizes about as many images, landmarks and users follow the rules as in the paper
PICTURES = 64


def write_cinic10(folder):
    """270,000 files: 9,000 of each class in each part."""
    pictures = _pictures(folder, "png", (32, 32))
    for part in ("train", "valid", "test"):
        for label, name in enumerate(CINIC):
            below = folder / "CINIC-10" / part / name
            below.mkdir(parents=True)
            for number in range(9_000):
                os.link(pictures[(label + number) % PICTURES], below / f"cifar10-{part}-{number}.png")


def write_inaturalist(folder, photographs=True):
    """675,170 annotations with places and users, as long-tailed as the real ones."""
    folder = folder / "inaturalist"
    folder.mkdir(parents=True)
    rows = draw_rows(WHOLE, folder)
    categories = [{"id": n, "name": name, "supercategory": "Aves"} for n, name in enumerate(rows.classes)]
    names = [f"train_val_images/Aves/{label}/{n:032x}.jpg" for n, label in enumerate(rows.labels.tolist())]
    for part, own in (("train", ~rows.test), ("val", rows.test)):
        ids = np.flatnonzero(own).tolist()
        images = [{"id": n, "file_name": names[n], "width": 800, "height": 600, "license": 3} for n in ids]
        annotations = [{"id": n, "image_id": n, "category_id": int(rows.labels[n])} for n in ids]
        places = [
            {"id": n, "lat": rows.places[n, 0], "lon": rows.places[n, 1], "user_id": str(rows.users[n])} for n in ids
        ]
        whole = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{part}2017.json").write_text(json.dumps(whole))
        (folder / f"{part}2017_locations.json").write_text(json.dumps(places))
    if photographs:
        _link(folder, names)


def write_landmarks(folder, photographs=True):
    """Landmarks and authors with Zipf's sizes; only the cleaned part has photographs."""
    folder = folder / "landmarks"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    landmark = np.sort(_zipf(draw, LANDMARKS, 200, 1.0))
    author = _zipf(draw, AUTHORS, 20, 0.85)
    ids = [f"{n * 2654435761 % 2**64:016x}" for n in range(ALL)]
    clean = np.sort(draw.choice(ALL, CLEAN, replace=False))
    kept, first = np.unique(landmark[clean], return_index=True)
    groups = np.split(clean, first[1:])
    with (folder / "train_clean.csv").open("w") as file:
        file.write("landmark_id,images\n")
        for name, group in zip(kept.tolist(), groups, strict=True):
            file.write(f"{name},{' '.join(ids[n] for n in group.tolist())}\n")
    with (folder / "train_attribution.csv").open("w") as file:
        file.write("id,url,author,license,title\n")
        for n, name in enumerate(author.tolist()):
            file.write(f'{ids[n]},https://upload.wikimedia.org/{n},"Author {name}, {name % 7}",CC BY-SA,File:{n}.jpg\n')
    if photographs:
        _link(folder, [f"train/{i[0]}/{i[1]}/{i[2]}/{i}.jpg" for i in (ids[n] for n in clean.tolist())])


def _zipf(draw, count, offset, power):
    weight = (np.arange(count) + offset) ** -float(power)
    return draw.choice(count, ALL, p=weight / weight.sum())


def _link(folder, names):
    pictures = _pictures(folder, "jpg", (80, 60))
    for parent in {os.path.dirname(name) for name in names}:
        (folder / parent).mkdir(parents=True, exist_ok=True)
    for n, name in enumerate(names):
        os.link(pictures[n % PICTURES], folder / name)


def _pictures(folder, ending, size):
    below, draw = folder / "pictures", np.random.default_rng(0)
    below.mkdir(parents=True, exist_ok=True)
    paths = [below / f"{n}.{ending}" for n in range(PICTURES)]
    for path in paths:
        Image.fromarray(draw.integers(0, 256, (3, 4, 3), dtype=np.uint8)).resize(size).save(path)
    return paths


READ = """
import sys, time
from pathlib import Path
from unskew.data.sources import load_rows
began = time.perf_counter()
rows = load_rows(sys.argv[1], Path(sys.argv[2]))
seconds = time.perf_counter() - began
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(seconds, int(status["VmHWM"].split()[0]) * 1024, len(rows), len(rows.classes))
"""


def suite():
    """Reading the annotations of the two large sets at full size, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_inaturalist(Path(folder), photographs=False)
        write_landmarks(Path(folder), photographs=False)
        for name in ("inaturalist", "inaturalist(balance=0)", "landmarks"):
            done = subprocess.run(
                [sys.executable, "-c", READ, name, folder], capture_output=True, text=True, check=True
            )
            seconds, memory, count, classes = map(float, done.stdout.split())
            remark = f"{count:,.0f} photographs of {classes:,.0f} classes kept; {memory / 1e9:.1f} GB at the peak"
            yield at_most(f"the annotations of {name}, full size", seconds, "s", 60, remark)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for write in (write_cinic10, write_inaturalist, write_landmarks):
        began = time.perf_counter()
        write(folder)
        print(f"{write.__name__}: {time.perf_counter() - began:.0f} s", flush=True)
