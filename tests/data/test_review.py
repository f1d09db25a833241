"""What a data set is reported to be before anything is trained."""

import numpy as np
import pytest

import unskew
from photo_tables import command, write_rows, write_table
from unskew.core.errors import UserError
from unskew.data import sources
from unskew.data.interface import Summary
from unskew.data.sources import review


def notes(classes, users=None):
    return review(Summary(classes, users or {}))


def test_a_set_without_oddities_has_no_notes():
    assert notes({"cat": (5, 2), "dog": (3, 1)}, {"a": (4, 1), "b": (4, 2)}) == []
    assert notes({"0": (5, 2), "1": (3, 1)}, {"a": (4, 0), "b": (4, 0)}) == [], "users of the test part are not known"


def test_classes_and_users_in_one_part_are_named():
    assert notes({"cat": (5, 2), "dog": (3, 0), "emu": (0, 1)}, {"a": (4, 1), "b": (4, 0), "c": (0, 2)}) == [
        "no training examples of 1 class of 3: emu",
        "no test examples of 1 class of 3: dog",
        "no training examples of 1 user of 3: c",
        "no test examples of 1 user of 3: b",
    ]
    many = notes({f"c{n}": (1, n > 6) for n in range(10)})
    assert many == ["no test examples of 7 classes of 10: c0, c1, c2, c3, c4 and 2 more"]


@pytest.mark.parametrize("pair", [("CAT", "cat"), ("sea gull", "sea_gull"), ("3", "3.0"), ("07", "7")])
def test_labels_that_look_like_one_are_named(pair):
    found = notes(dict.fromkeys((*pair, "8" if pair[0].isdigit() else "zebra"), (2, 1)))
    assert found == [f"labels that differ only in spelling count as different: {pair[0]} and {pair[1]}"]


def test_the_command_shows_classes_users_and_the_hint_for_sites(tmp_path, capsys):
    rows = [(f"pictures/{n}.png", ("ant", "bee")[n % 2], f"site {n % 3}", "", "", "") for n in range(10)]
    write_table(tmp_path, 10)
    path = write_rows(tmp_path / "t.csv", rows, ("path", "label", "user"))
    code, said, _ = command(capsys, "data", "check", f"table:{path}(size=8)", "--cache-dir", str(tmp_path / "cache"))
    assert code == 0
    assert "ant" in said
    assert "3 users (sites, authors): 2 to 3 training examples each; --partition users makes them clients" in said
    path.write_text(path.read_text().replace("label,user", "label,site"))
    code, said, _ = command(capsys, "data", "check", f"table:{path}(size=8)", "--cache-dir", str(tmp_path / "cache"))
    assert "unused columns: site (rename it to user?)" in said


@pytest.mark.parametrize(
    ("given", "meant"),
    [("photos.csv", "table:photos.csv"), ("x.csv(size=8)", r"table:x.csv\(size=8\)"), ("a.zip", "folder:a.zip"),
     ("a.npz", "arrays:a.npz"), (".", "folder:.")],
)  # fmt: skip
def test_a_file_without_its_kind_gets_a_hint(given, meant):
    with pytest.raises(UserError, match=rf"no data set is called .*; did you mean {meant}\?"):
        sources.parse(given)


def test_a_run_reports_the_notes_and_refuses_a_single_class(tmp_path):
    labels = np.arange(20) % 2
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images, y_test=labels + 2)
    options = {"partition": "iid", "clients": 2, "rounds": 1, "epochs": 1, "engine": "loop"}
    assert "no class in common" in " ".join(sources.load(f"arrays:{tmp_path / 'a.npz'}", None).notes)
    np.savez(tmp_path / "b.npz", x_train=images, y_train=labels * 0, x_test=images, y_test=labels)
    with pytest.raises(UserError, match="all training examples have the same label"):
        unskew.run(data=f"arrays:{tmp_path / 'b.npz'}", out=tmp_path / "one", **options)
