import hashlib
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import photo_tables
from unskew.core.errors import UserError
from unskew.data import published, sources
from unskew.data.arrays import from_arrays, measure
from unskew.data.interface import AS_PUBLISHED, DAMAGED, OTHER, Source

NAMES = [
    "digits", "cifar10", "cifar100", "mnist", "fashion-mnist",
    "emnist", "emnist-byclass", "emnist-bymerge", "emnist-digits", "emnist-letters", "emnist-mnist",
]  # fmt: skip
PHOTOGRAPHS = ["inaturalist", "landmarks", "cinic10", "tiny-imagenet", "omniglot"]


def refused(name, data_dir=None):
    return photo_tables.refused(sources.load, name, data_dir)


def write_python(folder, images, labels, key, names):
    folder.mkdir(parents=True)
    for name, part in names.items():
        batch = {b"data": images[part].reshape(-1, 3072), key.encode(): labels[part].tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def test_every_promised_name_is_in_the_table_and_every_source_in_the_docs():
    assert {*NAMES, *PHOTOGRAPHS, "folder", "table", "coco", "hf", "arrays"} <= set(sources.SOURCES)
    page = (Path(__file__).parents[2] / "docs/how-to/data.md").read_text()
    variants = re.compile("emnist-(by|di|mn)")  # of one set, which the page lists once
    assert [
        s.name for s in sources.SOURCES.values() if not variants.match(s.name) and f"`{s.spelling}`" not in page
    ] == []


def test_digits_come_inside_scikit_learn_with_every_fifth_as_test():
    from sklearn.datasets import load_digits

    held = load_digits()
    digits = sources.load("digits", None)
    assert (len(digits.train), len(digits.test)) == published.SETS["digits"].sizes == (1438, 359)
    assert digits.shape == (1, 8, 8)
    np.testing.assert_array_equal(digits.test.labels, held.target[4::5])
    # 16 levels are spread over 0..255: 1 -> 15.9, 8 -> 127.5 (to even), 16 -> 255
    wanted = {0: 0, 1: 16, 8: 128, 15: 239, 16: 255}
    for level, byte in wanted.items():
        assert set(digits.test.images[:, 0][held.images[4::5] == level]) == {byte}
    assert digits.test.images.dtype == np.uint8
    assert any("every fifth" in note for note in digits.notes)


def test_the_constants_of_digits_are_those_of_its_training_images():
    digits = sources.load("digits", None)
    mean, std = measure(digits.train.images)
    assert digits.mean == pytest.approx(mean, abs=1e-12)
    assert digits.std == pytest.approx(std, abs=1e-12)
    assert digits.mean[0] == pytest.approx((digits.train.images / 255).mean(), abs=1e-12)


@pytest.mark.parametrize("below", ["cifar-10-batches-bin", "."])
def test_cifar10_is_read_from_its_folder_or_from_where_its_files_lie(tmp_path, write_cifar10, below):
    images, labels = write_cifar10(tmp_path / below)
    read = sources.load("cifar10", tmp_path)
    np.testing.assert_array_equal(read.train.images, images[:15])
    np.testing.assert_array_equal(read.test.labels, labels[15:])
    assert read.name == "cifar10"
    assert read.augment
    assert read.train.images.flags.c_contiguous
    assert read.train.images.flags.writeable
    assert any("15 training and 3 test images; the published set has 50,000 and 10,000" in n for n in read.notes)


def test_both_layouts_of_cifar10_give_the_same_set(tmp_path, write_cifar10):
    images, labels = write_cifar10(tmp_path / "a" / "cifar-10-batches-bin")
    names = {f"data_batch_{i + 1}": slice(3 * i, 3 * i + 3) for i in range(5)} | {"test_batch": slice(15, 18)}
    write_python(tmp_path / "b" / "cifar-10-batches-py", images, labels, "labels", names)
    binary, python = sources.load("cifar10", tmp_path / "a"), sources.load("cifar10", tmp_path / "b")
    np.testing.assert_array_equal(binary.train.images, python.train.images)
    np.testing.assert_array_equal(binary.test.labels, python.test.labels)


def test_both_layouts_of_cifar100_take_the_fine_label(tmp_path, draw):
    images = draw.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    labels = np.array([0, 99, 50, 1, 2, 3])
    coarse = np.full(6, 19, np.uint8)
    records = np.concatenate([coarse[:, None], labels.astype(np.uint8)[:, None], images.reshape(6, -1)], axis=1)
    binary = tmp_path / "a" / "cifar-100-binary"
    binary.mkdir(parents=True)
    (binary / "train.bin").write_bytes(records[:4].tobytes())
    (binary / "test.bin").write_bytes(records[4:].tobytes())
    names = {"train": slice(0, 4), "test": slice(4, 6)}
    write_python(tmp_path / "b" / "cifar-100-python", images, labels, "fine_labels", names)
    for folder in ("a", "b"):
        read = sources.load("cifar100", tmp_path / folder)
        assert read.train.labels.tolist() == [0, 99, 50, 1]
        np.testing.assert_array_equal(read.test.images, images[4:])


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_from_each_folder_gzipped_or_not(tmp_path, write_idx, folder, packed):
    (images, labels), _ = write_idx(tmp_path / folder, packed=packed)
    read = sources.load("mnist", tmp_path)
    np.testing.assert_array_equal(read.train.images[:, 0], images)
    np.testing.assert_array_equal(read.train.labels, labels)
    assert read.train.images.flags.writeable
    assert not read.augment


@pytest.mark.parametrize(("split", "first"), [("balanced", 0), ("letters", 1), ("mnist", 0)])
def test_emnist_is_put_upright_and_counted_from_zero(tmp_path, write_idx, split, first):
    _, (images, labels) = write_idx(tmp_path / "EMNIST/raw", f"emnist-{split}-", "test", first=first)
    read = sources.load("emnist" if split == "balanced" else f"emnist-{split}", tmp_path)
    np.testing.assert_array_equal(read.test.images[:, 0], images.transpose(0, 2, 1))
    np.testing.assert_array_equal(read.test.labels, labels - first)
    assert read.test.images.flags.c_contiguous
    assert any("constants of EMNIST balanced" in note for note in read.notes) == (split != "balanced")


def test_a_label_below_the_first_letter_is_refused(tmp_path, write_idx):
    write_idx(tmp_path / "emnist", "emnist-letters-", "test", packed=False)
    (tmp_path / "emnist" / "emnist-letters-test-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x03\1\0\x1a")
    (tmp_path / "emnist" / "emnist-letters-train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x07" + b"\1" * 7)
    assert "the label of record 1 is 0, but labels range from 1 to 26" in refused("emnist-letters", tmp_path)


def test_image_and_label_files_of_two_lengths_are_refused(tmp_path, write_idx):
    write_idx(tmp_path / "mnist", packed=False)
    labels = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(b"\0\0\x08\x01\0\0\0\x02\1\2")
    assert "t10k-images-idx3-ubyte has 3 images" in refused("mnist", tmp_path)
    assert [f.status for f in sources.check("mnist", tmp_path)][-1] == DAMAGED


def test_a_published_file_needs_no_note(tmp_path, write_idx, monkeypatch):
    write_idx(tmp_path / "mnist")
    md5 = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in (tmp_path / "mnist").iterdir()}
    known = replace(published.SETS["mnist"], md5=md5, sizes=(7, 3))
    monkeypatch.setitem(published.SETS, "mnist", known)
    assert sources.load("mnist", tmp_path).notes == ()
    assert {f.status for f in sources.check("mnist", tmp_path)} == {AS_PUBLISHED}


def test_fashion_mnist_is_not_taken_for_mnist(tmp_path, write_idx, monkeypatch):
    write_idx(tmp_path / "plain")
    md5 = hashlib.md5((tmp_path / "plain" / "train-images-idx3-ubyte.gz").read_bytes()).hexdigest()
    monkeypatch.setitem(published._OWNER, md5, "fashion-mnist")
    assert "is the published file of fashion-mnist, not mnist" in refused("mnist", tmp_path / "plain")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("CIFAR10", "cifar10"),
        ("cifar-100", "cifar100"),
        ("digit", "digits"),
        ("fashion", None),
        ("foldr:pics", "folder:DIR"),
    ],
)
def test_an_unknown_name_brings_the_nearest(given, meant):
    message = refused(given)
    assert repr(given) in message
    assert (f"did you mean {meant!r}?" if meant else "fashion-mnist") in message


def test_a_set_not_found_lists_where_it_was_looked_for(tmp_path):
    message = refused("cifar10", tmp_path)
    for part in ("cifar-10-batches-bin", "cifar-10-batches-py", "unskew data fetch cifar10 --data-dir"):
        assert part in message
    assert str(tmp_path) in message


def test_checking_tells_whole_files_from_damaged_ones(tmp_path, write_cifar10):
    write_cifar10(tmp_path)
    assert {f.status for f in sources.check("cifar10", tmp_path)} == {OTHER}
    (tmp_path / "data_batch_3.bin").write_bytes(b"")
    findings = sources.check("cifar10", tmp_path)
    assert [f.whole for f in findings] == [True, True, False, True, True, True]
    assert "is empty" in findings[2].detail
    assert findings[0].size == 3 * 3073
    assert findings[0].detail == "3 images"


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist"])
def test_the_real_sets_read_whole(real_data, name):
    if {source.name: where for source, where in sources.survey(real_data)}[name] == "not found":
        pytest.skip(f"UNSKEW_TEST_DATA has no {name}")
    read, facts = sources.load(name, real_data), published.SETS[name]
    assert (len(read.train), len(read.test)) == facts.sizes
    assert read.shape == facts.shape
    counts = np.bincount(read.train.labels)
    assert set(counts) == {facts.sizes[0] // len(facts.classes)}
    mean, std = measure(read.train.images)
    assert mean == pytest.approx(read.mean, abs=1e-3)
    assert std == pytest.approx(read.std, abs=2e-2)


# The text that names a data set


@pytest.mark.parametrize(
    ("text", "path", "options"),
    [
        ("table:a.csv", "a.csv", {}),
        ("table:a.csv(size=128)", "a.csv", {"size": 128}),
        ("table:a.csv (size=128, broken=skip)", "a.csv", {"size": 128, "broken": "skip"}),
        ("table:a (1), b + c.csv(size=8)", "a (1), b + c.csv", {"size": 8}),
        ("folder:pictures (old)", "pictures (old)", {}),
        ("folder:pictures()", "pictures()", {}),
        ("folder:a:b=c", "a:b=c", {}),
        ("folder:what?", "what?", {}),
        ("inaturalist(balance=0, size=64)", "", {"balance": 0, "size": 64}),
        ("inaturalist(split='a (1).csv')", "", {"split": "a (1).csv"}),
    ],
)
def test_options_are_the_last_parentheses_with_option_and_value(text, path, options):
    request = sources.parse(text)
    assert (request.path, dict(request.call.knobs)) == (path, options)
    assert request.source.name == text.partition(":")[0].partition("(")[0]
    assert sources.parse(request.spell()).call.knobs == options


def test_a_file_of_exactly_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "pictures(size=8)"
    assert sources.parse(f"folder:{name}").path == "pictures"
    (tmp_path / name).mkdir()
    assert sources.parse(f"folder:{name}").path == name
    assert sources.parse(f"folder:{name}(size=4)").call.knobs == {"size": 4}
    assert sources.make_absolute(f"folder:{name}") == f"folder:{tmp_path / name}"


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sources.make_absolute("table:a.csv(size=8)") == f"table:{tmp_path}/a.csv(size=8)"
    assert sources.make_absolute("arrays:a.npz") == f"arrays:{tmp_path}/a.npz"
    for text in ("digits", "nodes", "package.module:function(path=a.csv)", "inaturalist(size=299)"):
        assert sources.make_absolute(text) == text


def load_noise(request, *, examples: int = 10, seed: int = 0):
    pixels = np.random.default_rng(seed).integers(0, 256, (examples, 4, 4), dtype=np.uint8)
    return from_arrays({"x_train": pixels, "y_train": np.arange(examples) % 2}, name=request.name, where="noise")


def test_a_new_source_is_one_function_and_one_line(monkeypatch):
    monkeypatch.setitem(sources.SOURCES, "noise", Source("noise", "random pixels", "drawn", load_noise))
    images = sources.load("noise(examples=20)", None)
    assert (images.name, len(images.train) + len(images.test)) == ("noise(examples=20)", 20)
    assert sources.load_examples("noise", None).labels.tolist() == [0, 1, 0, 1, 1, 0, 1, 0]
    assert sources.check("noise", None)[0].detail == "8 training and 2 test images"
    assert sources.make_absolute("noise(seed=1)") == "noise(seed=1)"
    assert ("noise", "inside scikit-learn") not in [(source.name, where) for source, where in sources.survey(None)]
    with pytest.raises(UserError, match=r"has no knob 'exmples'; did you mean 'examples'\?"):
        sources.load("noise(exmples=3)", None)
    with pytest.raises(UserError, match=r"examples must be a whole number, not 1\.5"):
        sources.load("noise(examples=1.5)", None)


def test_a_module_in_a_package_is_no_misspelled_source():
    assert "cannot be imported: ModuleNotFoundError" in refused("table.x:load")
