"""CINIC-10, Tiny-ImageNet and Omniglot in the layouts in which they are distributed: tiny copies."""

import numpy as np
import pytest

from unskew.core.errors import UserError
from unskew.data import sources

CINIC = ("airplane", "automobile", "bird")


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"picture")


@pytest.fixture
def cinic(tmp_path):
    for part, count in (("train", 3), ("valid", 2), ("test", 1)):
        for name in CINIC:
            touch(tmp_path / "CINIC-10", *(f"{part}/{name}/n{i}-{name}.png" for i in range(count)))
    touch(tmp_path / "CINIC-10", "README.md", "train/bird/.DS_Store", "train/bird/notes.txt")
    return tmp_path


def test_cinic10_has_train_and_test_and_validation_on_demand(cinic):
    rows = sources.load_rows("cinic10", cinic)
    assert rows.classes == CINIC
    assert np.bincount(rows.labels[~rows.test]).tolist() == [3, 3, 3]
    assert np.bincount(rows.labels[rows.test]).tolist() == [1, 1, 1]
    assert all(path.split("/")[1] == rows.classes[label] for path, label in zip(rows.paths, rows.labels, strict=True))
    both = sources.load_rows("cinic10(valid=train)", cinic)
    assert (~both.test).sum() == 15
    assert both.notes == ("the validation images are used for training too",)
    with pytest.raises(UserError, match=r"give 'train' .* or 'out'"):
        sources.load_rows("cinic10(valid=some)", cinic)


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    for wnid in ("n02", "n01", "n03"):
        touch(folder, *(f"train/{wnid}/images/{wnid}_{i}.JPEG" for i in range(2)), f"train/{wnid}/{wnid}_boxes.txt")
    touch(folder, "val/images/val_0.JPEG", "val/images/val_1.JPEG", "test/images/test_0.JPEG")
    (folder / "wnids.txt").write_text("n02\nn01\nn03\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tcrane\nn03\tcrane, derrick\nn09\tcat\n")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t32\t44\t62\nval_1.JPEG\tn03\t1\t2\t3\t4\n")
    return tmp_path


def test_tiny_imagenet_is_named_by_its_words_and_tested_on_its_validation_images(tiny):
    rows = sources.load_rows("tiny-imagenet", tiny)
    assert rows.classes == ("crane (n02)", "goldfish", "crane (n03)")
    assert rows.paths[:2] == ["train/n02/images/n02_0.JPEG", "train/n02/images/n02_1.JPEG"]
    assert rows.labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 2]
    assert np.array(rows.paths)[rows.test].tolist() == ["val/images/val_0.JPEG", "val/images/val_1.JPEG"]


def test_without_words_classes_have_their_ids_and_a_missing_file_is_named(tiny):
    (tiny / "tiny-imagenet-200" / "words.txt").write_text("")
    assert sources.load_rows("tiny-imagenet", tiny).classes == ("n02", "n01", "n03")
    (tiny / "tiny-imagenet-200" / "words.txt").unlink()
    with pytest.raises(UserError, match=r"words.txt cannot be read: No such file"):
        sources.load_rows("tiny-imagenet", tiny)


@pytest.fixture
def omniglot(tmp_path):
    folder = tmp_path / "omniglot-py"
    number = 0
    for part, alphabets in (("background", ("Greek", "Latin")), ("evaluation", ("Tibetan",))):
        for alphabet in alphabets:
            for character in ("character01", "character02"):
                number += 1
                names = (f"{number:04d}_{drawer:02d}.png" for drawer in range(1, 21))
                touch(folder, *(f"images_{part}/{alphabet}/{character}/{name}" for name in names))
    return tmp_path


def test_omniglots_characters_are_classes_and_its_drawers_users(omniglot):
    rows = sources.load_rows("omniglot", omniglot)
    assert rows.classes == tuple(f"{a}/character0{n}" for a in ("Greek", "Latin") for n in (1, 2))
    assert np.bincount(rows.labels[~rows.test]).tolist() == [16] * 4
    assert np.bincount(rows.labels[rows.test]).tolist() == [4] * 4
    assert len(set(rows.users.tolist())) == 40
    assert (rows.users == "Greek 7").sum() == 2  # one of each of its two characters
    assert not set(rows.users[rows.test].tolist()) & set(rows.users[~rows.test].tolist())
    assert len(sources.load_rows("omniglot(part=all)", omniglot).classes) == 6
    assert sources.load_rows("omniglot(part=evaluation)", omniglot).classes[0] == "Tibetan/character01"


def test_omniglot_refuses_another_part_and_a_picture_without_a_drawer(omniglot):
    with pytest.raises(UserError, match="give background, evaluation or all"):
        sources.load_rows("omniglot(part=test)", omniglot)
    touch(omniglot / "omniglot-py", "images_background/Greek/character01/extra.png")
    with pytest.raises(UserError, match=r"extra\.png: the name must end with a drawer's number"):
        sources.load_rows("omniglot", omniglot)
