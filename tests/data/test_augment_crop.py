"""Random resized crops: a twin in plain code defines them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import unskew
from photo_tables import as_arrays, write_table
from unskew.core.key import Key
from unskew.core.types import Local
from unskew.data import sources
from unskew.data.augment import RATIO, SCALE, boxes, draw_crops, resized_crop
from unskew.data.batches import Pixels, plan


def twin(image, box, flip):
    """One image: cut out, scaled, mirrored."""
    height, width = image.shape[1:]
    mean = (height * width) ** 0.5
    tall = min(height, max(1, round(float(box[2]) * mean)))
    wide = min(width, max(1, round(float(box[3]) * mean)))
    if height != width:
        tall, wide = min(tall, max(1, round(wide * 4 / 3))), min(wide, max(1, round(tall * 4 / 3)))
    top, left = int(float(box[0]) * (height - tall + 1)), int(float(box[1]) * (width - wide + 1))
    part = image[:, top : top + tall, left : left + wide].double()
    scaled = F.interpolate(part[None], size=(height, width), mode="bilinear", align_corners=False)[0]
    return scaled.flip(2) if flip else scaled


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 7, 19), (3, 1, 5), (3, 96, 64)])
def test_a_batch_is_the_twins_images(shape):
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.integers(0, 256, (40, *shape), dtype=np.uint8))
    box, flip = (torch.from_numpy(each) for each in draw_crops(rng, 40))
    box[:2] = torch.tensor([0.0, 0.0, 1.0, 1.0])  # as much of the image as there can be
    made = resized_crop(images, box, flip)
    wanted = torch.stack([twin(*each) for each in zip(images, box, flip, strict=True)])
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), wanted, rtol=0, atol=0.02)


def test_nothing_outside_the_part_and_no_black_edge_is_seen():
    images = torch.zeros((1, 1, 64, 64), dtype=torch.uint8)
    images[:, :, 20:40, 30:60] = 200
    box = torch.tensor([[20.5 / 45, 30.5 / 35, 20 / 64, 30 / 64]])
    assert boxes(box, 64, 64).tolist() == [[20, 30, 20, 30]]
    for flip in (False, True):
        made = resized_crop(images, box, torch.tensor([flip]))
        torch.testing.assert_close(made, torch.full_like(made, 200.0), rtol=0, atol=0.01)


def test_the_draws_have_the_stated_areas_and_ratios_and_reach_every_corner():
    box, flip = draw_crops(np.random.default_rng(0), 20_000)
    height, width = box[:, 2].astype(float), box[:, 3].astype(float)
    free = (height < 1) & (width < 1)
    area, ratio = (height * width)[free], (width / height)[free]
    assert SCALE[0] <= area.min() < 0.085
    assert 0.95 < area.max() <= SCALE[1] + 1e-6
    assert RATIO[0] <= ratio.min() + 1e-6
    assert ratio.min() < 0.76
    assert 1.32 < ratio.max() <= RATIO[1] + 1e-6
    assert abs(np.median(np.log(ratio))) < 0.01
    assert 0.48 < flip.mean() < 0.52
    for shape in ((64, 64), (60, 240), (300, 225)):
        placed = boxes(torch.from_numpy(box), *shape).double()
        seen = placed[:, 3] / placed[:, 2]
        assert 0.7 < seen.min() < 0.76, "width by height in pixels, whatever the photograph's own"
        assert 1.32 < seen.max() < 1.4
    placed = boxes(torch.from_numpy(box), 64, 64)
    assert placed.min() >= 0
    assert int((placed[:, 0] + placed[:, 2]).max()) == int((placed[:, 1] + placed[:, 3]).max()) == 64
    assert int(placed[:, 0].min()) == int(placed[:, 1].min()) == 0


def test_the_plan_draws_boxes_and_a_batch_applies_them():
    local = Local(epochs=1, batch=4, augment=True, augmentation="resized-crop")
    batches = plan(np.arange(8, dtype=np.int32), None, local, Key(0))
    assert batches.shift.shape == (2, 4, 4)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 3, 64, 64), dtype=np.uint8))
    pixels = Pixels.of(images, torch.arange(8), torch.tensor([0.5] * 3), torch.tensor([0.25] * 3), torch.float32)
    made, _ = pixels.batch(batches.index[0], batches.shift[0], batches.flip[0])
    wanted = resized_crop(images[batches.index[0]], batches.shift[0], batches.flip[0])
    torch.testing.assert_close(made, (wanted / 255 - 0.5) / 0.25)


def test_auto_is_a_resized_crop_for_large_photographs_of_a_table_alone(tmp_path):
    kinds = {}

    def see(event):
        if hasattr(event, "local"):
            kinds[event.config.data] = (event.local.augmentation, event.config.augmentation)

    large = f"table:{write_table(tmp_path, 10, low=40, high=41)}(size=64)"
    small = f"table:{tmp_path / 'photos.csv'}(size=32)"
    arrays = as_arrays(sources.load(large, None), tmp_path / "same.npz")
    options = {
        "partition": "iid", "clients": 2, "rounds": 1, "epochs": 1, "augment": True, "model": "tiny-cnn",
        "engine": "loop", "observe": see,
    }  # fmt: skip
    results = [
        unskew.run(data=data, out=tmp_path / str(place), **options) for place, data in enumerate((large, small, arrays))
    ]
    assert kinds == {large: ("resized-crop", "resized-crop"), small: ("shift", "auto"), arrays: ("shift", "auto")}
    chosen = unskew.run(data=arrays, augmentation="resized-crop", out=tmp_path / "chosen", **options)
    assert chosen.weights_sha256 == results[0].weights_sha256 != results[2].weights_sha256


def test_crops_are_cut_from_the_whole_photograph_and_evaluation_takes_its_middle(tmp_path):
    wide = np.zeros((100, 300, 3), np.uint8)
    wide[:, :100, 0] = wide[:, 100:200, 1] = wide[:, 200:, 2] = 255  # red, green, blue
    for number in range(6):
        Image.fromarray(wide).save(tmp_path / f"{number}.png")
    lines = [f"{number}.png,{'ab'[number % 2]},{'test' if number > 3 else 'train'}" for number in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *lines]))
    images = sources.load(f"table:{tmp_path / 't.csv'}(size=64)", None).train.images
    pixels = Pixels.of(images, torch.zeros(4, dtype=torch.int64), torch.zeros(3), torch.ones(3), torch.float32)
    plain, _ = pixels.batch(torch.arange(4))
    assert plain[:, 1].min() > 0.8, "the middle third"
    box, flip = (torch.from_numpy(each) for each in draw_crops(np.random.default_rng(0), 400))
    crops, _ = pixels.batch(torch.zeros(400, dtype=torch.int64), box, flip)
    assert crops.shape == (400, 3, 64, 64)
    shares = crops.mean((0, 2, 3))
    assert (shares > 0.2).all(), "every part of the photograph is seen"
    batched = resized_crop(torch.from_numpy(images.whole(np.array([0]))[0])[None], box[:1], flip[:1], (64, 64))
    assert torch.equal(crops[:1] * 255, batched) or torch.allclose(crops[:1] * 255, batched)
