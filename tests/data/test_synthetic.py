"""The drawn population has the shape that it says, follows its seed, and is written as a table."""

import csv
import io

import numpy as np
import pytest
from PIL import Image

from unskew.console.main import app
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import divide, leaf_cells, partition_examples
from unskew.data.population import Population, emd
from unskew.data.sources import load
from unskew.data.synthetic_set import Shape, class_sizes, draw_rows, pictures, population, shares, write_population

SMALL = Shape(users=40, classes=6, examples=300, test=30)
FEW = {"users": 12, "classes": 5, "examples": 60, "test": 20, "size": 8}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return draw_rows(Shape(), tmp_path_factory.mktemp("population"))


def test_it_has_the_numbers_of_inaturalist_user_120k(large):
    train = ~large.test
    assert len(np.unique(large.users[train])) == 9275
    assert np.bincount(large.labels[train]).tolist() == [100] * 1203
    found = partition_examples(
        "users", large.labels[train], clients=None, key=Key(0), users=large.users[train], classes=1203
    )
    assert emd(found.client, large.labels[train], 1203) == pytest.approx(1.83, abs=0.03)  # the paper's: 1.83
    sizes = np.sort(Population.from_partition(found).sizes)
    assert sizes[0] == 1
    assert sizes[-928:].sum() > 0.5 * sizes.sum()  # a long tail: a tenth of the users has more than half


def test_it_has_about_as_many_geo_clients_as_the_paper(large):
    pytest.importorskip("s2geometry")
    leaves = leaf_cells(large.places[~large.test])
    for most, low, high in ((30_000, 8, 20), (3_000, 100, 170), (100, 3_000, 4_200)):  # 11, 135 and 3,606
        sizes = np.unique(divide(leaves, most), return_counts=True)[1]
        assert low <= (sizes >= most / 100).sum() <= high


def test_the_whole_of_2017_has_1203_classes_with_100_examples():
    sizes = class_sizes(Shape(classes=5089, examples=579_184, balanced=False), 579_184)
    assert sizes.sum() == 579_184
    assert (sizes >= 100).sum() == 1203
    assert sizes.min() >= 1


def test_places_are_on_earth_and_neighbours_see_the_same_species(large):
    assert (np.abs(large.places) <= [90, 180]).all()
    assert np.isfinite(large.places).all()
    draw = np.random.default_rng(0)
    pairs = draw.integers(0, 120_300, (200_000, 2))
    near = np.abs(large.places[pairs[:, 0]] - large.places[pairs[:, 1]]).max(axis=1) < 5
    same = large.labels[pairs[:, 0]] == large.labels[pairs[:, 1]]
    assert same[near].mean() > 2 * same[~near].mean()


def test_the_seed_decides(tmp_path):
    first, again, other = (draw_rows(SMALL, tmp_path, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.labels, again.labels)
    assert np.array_equal(first.places, again.places)
    assert not np.array_equal(first.places, other.places)
    assert list(pictures(first, seed=3)) == list(pictures(again, seed=3))


def test_pictures_are_small_and_those_of_a_class_are_alike(tmp_path):
    rows = draw_rows(SMALL, tmp_path)
    drawn = np.stack([np.asarray(Image.open(io.BytesIO(raw)), float) for raw in pictures(rows, size=16)])
    assert drawn.shape == (330, 16, 16, 3)
    centre = np.stack([drawn[:300][rows.labels[:300] == c].mean(axis=0) for c in range(6)])
    nearest = ((drawn[300:, None] - centre) ** 2).sum(axis=(2, 3, 4)).argmin(axis=1)
    assert (nearest == rows.labels[300:]).mean() > 0.9


@pytest.mark.parametrize("total", [10, 11, 57, 1000])
def test_shares_add_up(total):
    weight = np.array([1e-9, 1, 2, 700.0])
    found = shares(weight, total, least=1)
    assert found.sum() == total
    assert found.min() == 1
    assert np.abs(found - 1 - weight / weight.sum() * (total - 4)).max() < 1


def test_the_command_writes_a_csv_with_pictures_beside_it(tmp_path, capsys):
    file = tmp_path / "small.csv"
    sizes = ["--users", "40", "--classes", "6", "--examples", "300", "--test", "30", "--size", "8"]
    app(args=["data", "generate", "--out", str(file), *sizes], standalone_mode=False)
    assert "330 examples of 40 users and 6 classes" in capsys.readouterr().out
    with file.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    assert len(lines) == 330
    assert sum(line["split"] == "test" for line in lines) == 30
    for line in lines[::50]:
        assert Image.open(io.BytesIO((tmp_path / line["path"]).read_bytes())).size == (8, 8)


def test_a_parquet_file_has_the_pictures_inside(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = write_population(tmp_path / "small.parquet", SMALL, size=8)
    table = parquet.read_table(tmp_path / "small.parquet")
    assert table.column_names == ["image", "label", "user", "latitude", "longitude", "split"]
    assert table["image"].to_pylist() == list(pictures(rows, size=8))
    assert [p.name for p in tmp_path.iterdir()] == ["small.parquet"]


@pytest.mark.parametrize("shape", [{"users": 0}, {"classes": 1}, {"test": 0}, {"examples": 100}, {"examples": 10**9}])
def test_a_population_that_cannot_be_is_refused(shape):
    with pytest.raises(UserError, match="the population is too small or too large"):
        Shape(**shape)


def test_it_is_a_data_set_by_name_with_users_places_and_the_sizes_that_were_asked_for():
    knobs = ", ".join(f"{name}={value}" for name, value in FEW.items())
    made = load(f"unskew.data.synthetic_set:population({knobs})", None)
    assert (made.train.images == population(**FEW).train.images).all()
    assert made.train.images.shape == (60, 3, 8, 8)
    assert len(made.test) == 20
    assert len(np.unique(made.users)) == 12
    assert made.places.shape == (60, 2)
    assert len(made.test_users) == 20
    assert np.bincount(made.train.labels).tolist() == [12] * 5
    with pytest.raises(UserError, match="4 to 512"):
        load("unskew.data.synthetic_set:population(size=2)", None)


def test_noise_makes_classes_hard_to_tell_apart():
    plain, clean, noisy = (population(**FEW, **knobs) for knobs in ({}, {"noise": 0}, {"noise": 120.0}))
    assert (plain.train.labels == noisy.train.labels).all()

    def spread(made):  # how far pictures of one class are from their mean
        first = made.train.images[made.train.labels == 0].astype(float)
        return float(first.std(0).mean())

    assert spread(clean) < spread(plain) < spread(noisy)
    for wrong in (-1, 1001, float("nan")):
        with pytest.raises(UserError, match="0 to 1000"):
            population(**FEW, noise=wrong)
