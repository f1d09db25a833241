"""The cache of decoded photographs: damage, crashes, two processes, budgets; what is read is right or is not read."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from photo_tables import load_table, write_table
from unskew.core.errors import StorageFailure
from unskew.data import photographs, store
from unskew.data.photographs import Files, open_photographs, with_memory
from unskew.data.store import ENTRY, HEADER, Cache


@pytest.fixture
def table(tmp_path):
    return f"{write_table(tmp_path, 20, low=30, high=31)}(size=16)"


@pytest.fixture
def decoded(monkeypatch):
    """Counts the photographs that are decoded."""
    counted = []
    real = photographs.decode
    monkeypatch.setattr(photographs, "decode", lambda *given: counted.append(given) or real(*given))
    return counted


def pixels(images):
    return np.concatenate([images.train.images[:], images.test.images[:]])


def files(cache):
    (folder,) = filter(Path.is_dir, (cache.folder / "images").iterdir())
    return folder / "pixels", folder / "index"


def test_the_second_time_nothing_is_decoded(table, cache, decoded):
    first = pixels(load_table(table, cache))
    assert len(decoded) == 20
    again = load_table(table, cache)
    assert np.array_equal(pixels(again), first)
    assert len(decoded) == 20


def test_a_changed_file_is_decoded_again_and_alone(table, cache, decoded, tmp_path):
    first = load_table(table, cache)
    changed = tmp_path / "pictures" / "0.png"
    changed.write_bytes((tmp_path / "pictures" / "1.png").read_bytes())
    again = load_table(table, cache)
    assert len(decoded) == 21
    assert np.array_equal(again.train.images[0], first.train.images[1])
    assert again.train.images.sha256 != first.train.images.sha256


def test_a_damaged_record_is_decoded_again(table, cache, decoded):
    images = load_table(table, cache)
    right = pixels(images)
    with files(cache)[0].open("r+b") as file:
        file.seek(HEADER + 100)
        file.write(b"damage")
    assert np.array_equal(pixels(images), right)
    assert len(decoded) == 21


def test_what_is_damaged_and_has_no_file_any_more_stops_the_run(table, cache, tmp_path):
    images = load_table(table, cache)
    files(cache)[0].unlink()
    (tmp_path / "pictures" / "0.png").unlink()
    text, arrays = images.train.images.described()
    with pytest.raises(StorageFailure, match=r"0\.png cannot be read .*; it was intact when the table was read"):
        open_photographs(text, arrays).take(np.array([0]))


def test_a_photograph_that_changes_during_a_run_stops_it(table, cache, tmp_path):
    images = load_table(table, replace(cache, disk=0, memory=0))
    (tmp_path / "pictures" / "0.png").write_bytes((tmp_path / "pictures" / "1.png").read_bytes())
    with pytest.raises(StorageFailure, match=r"0\.png has changed since the table was read"):
        images.train.images.take(np.array([0]))


def test_random_damage_never_gives_other_pixels(table, cache):
    images = load_table(table, cache)
    right, sha256 = pixels(images), images.train.images.sha256
    draw = np.random.default_rng(0)
    for turn in range(12):
        path = files(cache)[turn % 2]
        content = bytearray(path.read_bytes())
        for place in draw.integers(0, len(content), 20):
            content[place] ^= 1 << draw.integers(0, 8)
        path.write_bytes(content)
        again = load_table(table, cache)
        assert np.array_equal(pixels(again), right)
        assert again.train.images.sha256 == sha256


def test_an_interrupted_pass_goes_on_where_it_was(table, cache, decoded, monkeypatch):
    monkeypatch.setattr(photographs, "CHUNK", 4)

    def interrupt(stage, done, total):
        if done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_table(table, cache, interrupt)
    assert len(decoded) == 8
    told = []
    images = load_table(table, cache, lambda *words: told.append(words))
    assert len(decoded) == 20
    assert told[1] == (photographs.READING, 12, 20)
    fresh = load_table(table, replace(cache, folder=cache.folder / "other"))
    assert (images.mean, images.std) == (fresh.mean, fresh.std)


def test_beyond_the_budget_on_disk_photographs_are_decoded_when_needed(table, cache, decoded):
    right = pixels(load_table(table, cache))
    small = Cache(cache.folder / "small", 5 * 768 + 2 * HEADER, 10**6)
    images = load_table(table, small)
    assert files(small)[0].stat().st_size == HEADER + 5 * 768
    assert any("15 photographs beyond --cache-disk" in note for note in images.notes)
    del decoded[:]
    assert np.array_equal(pixels(images), right)
    assert len(decoded) == 15
    assert np.array_equal(pixels(images), right)
    assert len(decoded) == 15, "kept in memory"
    del decoded[:]
    assert np.array_equal(pixels(load_table(table, replace(small, disk=10**9))), right)
    assert len(decoded) == 15, "stored, now that there is room"


def test_what_is_kept_in_memory_stays_within_its_budget(table, cache):
    images = load_table(table, replace(cache, disk=0, memory=3 * 768 + 5)).train.images
    images.take(np.arange(len(images)))
    assert images.recent.bytes == 3 * 768
    assert [row for row in range(16) if images.recent.get((images.sha256, row)) is not None] == [13, 14, 15]


def test_the_longest_unused_store_makes_room_and_who_reads_it_goes_on(tmp_path, cache):
    tables = [f"{write_table(tmp_path / name, 10)}(size=16)" for name in "ab"]
    small = replace(cache, disk=2 * (10 * 768 + HEADER) + 8000)

    def stores():
        return {path.name for path in (small.folder / "images").iterdir() if path.is_dir()}

    used = load_table(tables[0], small)
    (first,) = stores()
    load_table(tables[1], small)
    assert len(stores() - {first}) == len(stores()) == 1
    assert pixels(used).any()


def test_two_readers_at_once_decode_a_table_once_between_them(table, cache, decoded):
    with ThreadPoolExecutor(2) as pool:  # a lock belongs to an open file: threads exclude each other as processes do
        both = list(pool.map(load_table, [table] * 2, [cache] * 2))
    assert len(decoded) == 20
    assert len({images.train.images.sha256 for images in both}) == 1
    assert files(cache)[0].stat().st_size == HEADER + 20 * 768
    assert files(cache)[1].stat().st_size == HEADER + 20 * ENTRY.itemsize


def test_a_full_disk_is_a_budget_that_was_reached(table, cache, monkeypatch):
    right = pixels(load_table(table, cache))
    real = os.pwrite

    def full(descriptor, content, offset):
        if offset > 3000:
            raise OSError(28, "No space left on device")
        return real(descriptor, content, offset)

    monkeypatch.setattr(store.os, "pwrite", full)
    images = load_table(table, replace(cache, folder=cache.folder / "full"))
    assert np.array_equal(pixels(images), right)


def test_another_process_opens_the_same_images_from_their_description(table, cache, decoded):
    images = load_table(table, replace(cache, disk=8 * 768)).train.images
    text, arrays = images.described()
    assert len(text) < 1000
    assert all(len(values) == 16 for values in arrays.values())
    same = open_photographs(with_memory(text, 4), arrays)
    assert same.memory == cache.memory // 4
    assert np.array_equal(same[:], images[:])
    assert same[3].shape == (3, 16, 16)
    assert np.array_equal(same[-2:], images[:][-2:])
    files(cache)[0].rename(files(cache)[0].with_name("gone"))
    assert np.array_equal(open_photographs(text, arrays)[:], images[:]), "decoded where the store is gone"


def test_no_descriptor_is_left_open(table, cache):
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        images = load_table(table, cache)
        images.train.images.take(np.array([0]))
        del images
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(("query", "most"), [("", 6), ("(size=15)", 8), ("(size=30)", 4)])
def test_large_photographs_are_decoded_a_few_at_a_time(tmp_path, cache, monkeypatch, query, most):
    path = write_table(tmp_path, 30, low=20, high=21)
    monkeypatch.setattr(photographs, "CHUNK_BYTES", 6 * 3 * 20**2)
    asked, contents_of = [], Files.contents
    monkeypatch.setattr(Files, "contents", lambda self, rows: asked.append(len(rows)) or contents_of(self, rows))
    load_table(f"{path}{query}", cache)
    assert (max(asked), sum(asked)) == (most, 30)
    asked.clear()
    monkeypatch.setattr(photographs, "_read_counts", lambda *_: None)
    took, take = [], photographs.Photographs.take
    monkeypatch.setattr(photographs.Photographs, "take", lambda self, rows: took.append(len(rows)) or take(self, rows))
    load_table(f"{path}{query}", cache)
    assert (asked, sum(took)) == ([], 24)
    assert max(took) <= 1.5 * most


def test_photographs_that_were_changed_do_not_fill_the_cache_for_ever(tmp_path, table, cache, decoded):
    room = 3 * 20 * 3 * 16**2  # three times the table, and the index
    small = replace(cache, disk=room)
    for turn in range(8):
        for number in range(20):
            os.utime(tmp_path / "pictures" / f"{number}.png", (turn, turn))
        images = load_table(table, small)
        assert not any("beyond" in note for note in images.notes)
        assert sum(file.stat().st_size for file in files(cache)) <= room
    assert len(decoded) == 8 * 20
    load_table(table, small)
    assert len(decoded) == 8 * 20
