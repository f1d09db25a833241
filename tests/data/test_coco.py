"""COCO's annotations as one class for each photograph."""

import json

import pytest
from PIL import Image

from unskew.core.errors import UserError
from unskew.data import sources


@pytest.fixture
def coco(tmp_path):
    """COCO's own layout: annotations/instances_train2017.json, train2017/, and the same of val."""
    (tmp_path / "annotations").mkdir()

    def write(part, annotations, images=6, **fields):
        (tmp_path / part).mkdir(exist_ok=True)
        for number in range(images):
            Image.new("RGB", (30 + number, 20), (number, 0, 0)).save(tmp_path / part / f"{number}.png")
        content = {
            "images": [{"id": number, "file_name": f"{number}.png", **fields} for number in range(images)],
            "annotations": annotations,
            "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 5, "name": "emu"}],
        }
        path = tmp_path / "annotations" / f"instances_{part}.json"
        path.write_text(json.dumps(content))
        return path

    return write


def one(image, category, **more):
    return {"image_id": image, "category_id": category, **more}


def test_the_largest_area_is_the_class_and_val_is_test(coco):
    mixed = [one(0, 7, area=5.0), one(0, 3, area=3.0), one(0, 3, area=3.0), one(1, 7, bbox=[0, 0, 2, 2]), one(2, 3)]
    path = coco("train2017", [*mixed, one(2, 7), one(3, 7), one(3, 7), one(3, 3)])
    coco("val2017", [one(0, 3), one(1, 5)])
    images = sources.load(f"coco:{path}(size=8)", None)
    assert images.classes == ("dog", "emu", "cat"), "in the order of their ids, without those that nothing has"
    assert images.train.labels.tolist() == [0, 2, 0, 2], "6 to 5; its box; the first of two; two to one"
    assert images.test.labels.tolist() == [0, 1]
    notes = " ".join(images.notes)
    assert "instances_train2017.json: left out 2 photographs without an annotation" in notes
    assert "of several categories" in notes
    assert "instances_val2017.json is used for testing" in notes


def test_without_a_second_file_every_fifth_is_test_and_locations_are_users(coco):
    path = coco("train2017", [one(n, 3 if n % 2 else 7) for n in range(6)], location="trap 1")
    images = sources.load(f"coco:{path}(size=8)", None)
    assert (len(images.train), len(images.test)) == (5, 1)
    assert set(images.users) == {"trap 1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"category_id": 7', '"category_id": 8'), "unknown category"),
        (lambda text: text.replace("0.png", "absent.png"), r"give its folder as \(images=\"DIR\"\)"),
        (lambda text: text[:40], "is damaged, or another kind of file"),
        (lambda text: text.replace('"id": 1,', '"id": 0,'), "lists an image twice"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(coco, change, message):
    path = coco("train2017", [one(n, 3 if n % 2 else 7) for n in range(6)])
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message):
        sources.load(f"coco:{path}(size=8)", None)
    with pytest.raises(UserError, match="No such file"):
        sources.load(f"coco:{path}x", None)


def test_its_paths_are_made_absolute_so_that_a_run_can_be_used_from_any_folder(coco, tmp_path, monkeypatch):
    for part in ("train2017", "other"):
        coco(part, [one(n, 3 if n % 2 else 7) for n in range(6)])
    monkeypatch.chdir(tmp_path / "annotations")
    text = sources.make_absolute('coco:instances_train2017.json(images="../train2017", test="instances_other.json")')
    monkeypatch.chdir("/")
    images = sources.load(text, None)
    assert (len(images.train), len(images.test)) == (6, 6)
