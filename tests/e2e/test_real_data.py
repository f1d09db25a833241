"""On the real image sets, where there are any: UNSKEW_TEST_DATA names the folder."""

import pytest

import unskew
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.population import emd
from unskew.data.sources import load


@pytest.mark.heavy
def test_a_skewed_federation_learns_cifar10_the_same_in_loop_and_pool(real_data, tmp_path):
    options = {
        "data": "cifar10", "data_dir": str(real_data), "partition": "dirichlet(alpha=0.5)", "method": "fedavgm(0.5)",
        "rounds": 3, "epochs": 1, "lr": 0.02, "batch": 32,
    }  # fmt: skip
    pool = unskew.run(out=tmp_path / "pool", engine="pool", workers=2, **options)
    assert pool.accuracy > 0.25
    loop = unskew.run(out=tmp_path / "loop", engine="loop", **options)
    assert loop.weights_sha256 == pool.weights_sha256


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_published_splits_grow_more_skewed_as_alpha_falls(real_data, name):
    images = load(name, real_data)
    found = []
    files = (real_data / "hsu-splits").glob(f"{name}_alpha_*.csv")
    for file in sorted(files, key=lambda file: float(file.stem.split("_")[-1])):
        options = {"clients": None, "key": Key(0), "classes": len(images.classes)}
        split = partition_examples(f"file:{file}", images.train.labels, **options)
        assert split.clients == 100
        found.append(emd(split.client, images.train.labels, len(images.classes)))
    assert len(found) > 2
    assert found == sorted(found, reverse=True)


@pytest.mark.heavy
def test_fashion_mnist_trains_on_grey_images(real_data, tmp_path):
    options = {"data": "fashion-mnist", "data_dir": str(real_data), "partition": "iid"}
    result = unskew.run(**options, rounds=3, epochs=1, lr=0.05, out=tmp_path / "run")
    assert result.accuracy > 0.6  # simple-cnn starts slowly: 46 % after the first round
