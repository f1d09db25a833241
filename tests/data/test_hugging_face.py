"""Data sets of Hugging Face's library, saved to a folder: the hub needs a network."""

import numpy as np
import pytest
from PIL import Image

from unskew.core.errors import UserError
from unskew.data import sources
from unskew.data.store import Cache


@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    draw = np.random.default_rng(0)

    def rows(count):
        pictures = [Image.fromarray(draw.integers(0, 256, (12, 9, 3), dtype=np.uint8)) for _ in range(count)]
        return {"img": pictures, "label": [n % 2 for n in range(count)], "site": [f"s{n % 3}" for n in range(count)]}

    features = datasets.Features(
        img=datasets.Image(), label=datasets.ClassLabel(names=["zebra", "ant"]), site=datasets.Value("string")
    )
    parts = {name: datasets.Dataset.from_dict(rows(n), features=features) for name, n in (("train", 12), ("test", 4))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    return tmp_path / "set"


def test_a_saved_data_set_has_its_classes_users_and_test_part(saved, tmp_path):
    cache = Cache(tmp_path / "cache", 10**9, 10**8)
    images = sources.load(f"hf:{saved}(user=site)", None, cache)
    assert images.classes == ("zebra", "ant")
    assert images.shape == (3, 12, 9)
    assert (len(images.train), len(images.test)) == (12, 4)
    assert images.train.labels.tolist() == [0, 1] * 6
    assert images.users.tolist() == ["s0", "s1", "s2"] * 4
    again = sources.load(f"hf:{saved}(user=site)", None, cache)
    assert again.train.images.sha256 == images.train.images.sha256
    assert len(list((tmp_path / "cache" / "hf").iterdir())) == 1


def test_a_wrong_column_or_split_is_named(saved):
    with pytest.raises(UserError, match=r"has no label column; choose one with .label=….: img, label, site"):
        sources.load(f"hf:{saved}(label=kind)", None)
    with pytest.raises(UserError, match="has no split dev; choose from train, test"):
        sources.load(f"hf:{saved}(test=dev)", None)


def test_a_name_of_the_hub_stays_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sources.make_absolute("hf:someone/flowers(label=kind)") == "hf:someone/flowers(label=kind)"
    assert sources.find_moved("hf:someone/flowers", None) == "hf:someone/flowers"
