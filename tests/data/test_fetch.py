import hashlib
import io
import shutil
import stat
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from unskew.core.errors import UserError
from unskew.data import fetch as module
from unskew.data import sources
from unskew.data.federated_vision import read_split
from unskew.data.fetch import fetch, unpack
from unskew.data.interface import Download


@pytest.fixture
def server(monkeypatch):
    """A web server on this machine; ``server.files`` maps a path to its bytes, or to what the handler shall do."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(module, "PAUSE", 0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append((self.path, self.headers.get("Range")))
            answer = self.server.files.get(self.path)
            if answer is None:
                self.send_error(404)
            elif callable(answer):
                answer(self)
            else:
                self.give(answer)

        def give(self, raw, cut=None):
            """The file, or what was asked for of it; the connection ends after ``cut`` bytes of the body."""
            asked = self.headers.get("Range")
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if start >= len(raw) > 0:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(raw) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(raw) - 1}/{len(raw)}")
            self.end_headers()
            self.wfile.write(raw[start:][:cut])

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.files, running.asked, running.address = {}, [], f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def silent(done, total):
    pass


def refused(name, folder, mirror, kept=0):
    """The message of a fetch that fails, after which ``kept`` bytes of a download are there and nothing else."""
    with pytest.raises(UserError, match=r"\A[^\n]+\Z") as caught:
        fetch(name, folder, mirror=mirror, report=silent)
    left = [p for p in folder.rglob("*") if p.is_file()]
    assert [p.stat().st_size for p in left] == [kept] * bool(kept)
    return str(caught.value)


def md5(raw):
    return hashlib.md5(raw).hexdigest()


FILE = tarfile.REGTYPE


def tarred(*entries):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, kind, raw in entries:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(raw)
            info.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            archive.addfile(info, io.BytesIO(raw))
    return packed.getvalue()


def tar(members):
    return tarred(*((name, FILE, raw) for name, raw in members.items()))


def zipped(members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items() if isinstance(members, dict) else members:
            archive.writestr(name, raw)
    return packed.getvalue()


def set_download(monkeypatch, name, download):
    monkeypatch.setitem(sources.SOURCES, name, replace(sources.SOURCES[name], download=download))


def publish(monkeypatch, server, name, archive, raw):
    """Put ``raw`` on the server as the published archive of a set."""
    set_download(monkeypatch, name, replace(sources.SOURCES[name].download, files={archive: md5(raw)}))
    server.files[f"/{archive}"] = raw


RECORD = b"\x01\x02" + bytes(3072)
CIFAR100 = {"cifar-100-binary/train.bin": RECORD * 3, "cifar-100-binary/test.bin": RECORD}


def test_an_archive_is_fetched_unpacked_and_read(tmp_path, server, monkeypatch):
    raw = tar({"cifar-100-binary/fine_label_names.txt": b"apple\n"} | CIFAR100)
    publish(monkeypatch, server, "cifar100", "cifar-100-binary.tar.gz", raw)
    told = []
    folder = fetch("cifar100", tmp_path / "data", mirror=server.address, report=lambda *n: told.append(n))
    assert folder == tmp_path / "data" / "cifar-100-binary"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["test.bin", "train.bin"]
    assert told[0] == (0, len(raw))
    assert told[-1] == (len(raw), len(raw))
    assert len(sources.load("cifar100", tmp_path / "data").train) == 3


def test_what_is_there_and_whole_is_not_fetched_again_and_what_is_damaged_is(tmp_path, server, monkeypatch):
    publish(monkeypatch, server, "cifar100", "cifar-100-binary.tar.gz", tar(CIFAR100))
    folder = fetch("cifar100", tmp_path, mirror=server.address + "/", report=silent)
    kept = server.files.copy()
    server.files.clear()
    assert fetch("cifar100", tmp_path, mirror=server.address, report=silent) == folder
    server.files.update(kept)
    (folder / "test.bin").write_bytes(b"damaged")
    fetch("cifar100", tmp_path, mirror=server.address, report=silent)
    assert (folder / "test.bin").read_bytes() == RECORD


def test_a_zip_is_fetched_and_only_its_expected_members_are_kept(tmp_path, server, monkeypatch, write_idx):
    for split in ("balanced", "byclass", "bymerge", "digits", "letters", "mnist"):
        write_idx(tmp_path / "made", f"emnist-{split}-", "test", first=int(split == "letters"))
    members = {f"gzip/{path.name}": path.read_bytes() for path in (tmp_path / "made").iterdir()}
    raw = zipped({"gzip/emnist-balanced-mapping.txt": b"x"} | members)
    publish(monkeypatch, server, "emnist-letters", "gzip.zip", raw)
    folder = fetch("emnist-letters", tmp_path / "data", mirror=server.address, report=silent)
    assert len(list(folder.iterdir())) == 24
    assert len(sources.load("emnist", tmp_path / "data").train) == 7


def test_an_archive_without_its_members_is_refused(tmp_path, server, monkeypatch):
    publish(monkeypatch, server, "cifar100", "cifar-100-binary.tar.gz", tar({"other": b"x"}))
    assert "has no cifar-100-binary/test.bin, cifar-100-binary/train.bin" in refused(
        "cifar100", tmp_path, server.address
    )


def test_a_body_that_breaks_off_is_said(tmp_path, server):
    def half(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 400)

    server.files["/cifar-10-binary.tar.gz"] = half
    message = refused("cifar10", tmp_path, server.address, kept=400)
    assert "the connection was lost after 400 of 1,000 bytes" in message
    assert "400 B were kept; run the same command again to continue" in message
    assert len(server.asked) == module.TRIES


def test_a_silent_server_is_given_up(tmp_path, server, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    asleep = threading.Event()
    server.files["/cifar-10-binary.tar.gz"] = lambda handler: asleep.wait(5)
    message = refused("cifar10", tmp_path, server.address)
    asleep.set()
    assert "timed out" in message


# A connection that is cut, and what servers make of being asked for the rest

WHOLE = tar({**CIFAR100, "cifar-100-binary/other": hashlib.sha512(b"").digest() * 200})


def test_a_cut_connection_is_continued_where_it_broke_off(tmp_path, server, monkeypatch):
    publish(monkeypatch, server, "cifar100", "cifar-100-binary.tar.gz", WHOLE)
    third, said = len(WHOLE) // 3, []
    ends = [third, None]
    server.files["/cifar-100-binary.tar.gz"] = lambda handler: handler.give(WHOLE, cut=ends.pop(0))
    fetch("cifar100", tmp_path, mirror=server.address, report=silent, say=said.append)
    assert (tmp_path / "cifar-100-binary" / "train.bin").read_bytes() == RECORD * 3
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["test.bin", "train.bin"]
    assert [asked[1] for asked in server.asked] == [None, f"bytes={third}-"]
    lost = f"the connection was lost after {third:,} of {len(WHOLE):,} bytes; continuing"
    assert said[0] == f"{server.address}/cifar-100-binary.tar.gz: {lost}"


# Mirrors


def test_mirrors_are_tried_in_turn_and_it_is_said(tmp_path, server, monkeypatch):
    files = {"cifar-100-binary.tar.gz": md5(WHOLE)}
    members = sources.SOURCES["cifar100"].download.members
    bases = [f"{server.address}/{name}/" for name in ("absent", "wrong", "right")]
    wanted = Download(bases[0], "cifar-100-binary", files, members, mirrors=tuple(bases[1:]))
    set_download(monkeypatch, "cifar100", wanted)
    server.files["/wrong/cifar-100-binary.tar.gz"] = b"something else"
    server.files["/right/cifar-100-binary.tar.gz"] = WHOLE
    said = []
    fetch("cifar100", tmp_path, mirror=None, report=silent, say=said.append)
    assert "the server answered 404" in said[0]
    assert said[0].endswith(f"trying {bases[1]}cifar-100-binary.tar.gz")
    assert "is not the published file" in said[1]
    assert said[1].endswith(f"trying {bases[2]}cifar-100-binary.tar.gz")
    del server.files["/right/cifar-100-binary.tar.gz"]
    shutil.rmtree(tmp_path / "cifar-100-binary")
    message = refused("cifar100", tmp_path, None)
    assert message.count("answered 404") == 2
    assert "0 B were kept" in message


# Archives that are unpacked whole


OMNIGLOT = {
    f"images_{part}/{alphabet}/character01/0001_{drawer:02d}.png": b"picture"
    for part, alphabet in (("background", "Greek"), ("evaluation", "Tibetan"))
    for drawer in range(1, 6)
}


def publish_omniglot(monkeypatch, server):
    files = {}
    for part in ("background", "evaluation"):
        raw = zipped({name: content for name, content in OMNIGLOT.items() if part in name})
        files[f"images_{part}.zip"] = md5(raw)
        server.files[f"/images_{part}.zip"] = raw
    set_download(monkeypatch, "omniglot", Download(server.address, "omniglot", files, tree=""))


def test_omniglot_is_fetched_unpacked_and_read(tmp_path, server, monkeypatch):
    publish_omniglot(monkeypatch, server)
    folder = fetch("omniglot", tmp_path, mirror=None, report=silent)
    assert {str(p.relative_to(folder)) for p in tmp_path.rglob("*") if p.is_file()} == set(OMNIGLOT)
    assert len(sources.load_rows("omniglot(part=all)", tmp_path).classes) == 2
    server.files.clear()
    assert fetch("omniglot", tmp_path, mirror=None, report=silent) == folder


def test_unpacking_that_was_interrupted_needs_no_second_download(tmp_path, server, monkeypatch):
    publish_omniglot(monkeypatch, server)
    copy, copied = module._copy, []

    def interrupted(*arguments):
        copied.append(arguments)
        if len(copied) == 3:
            raise KeyboardInterrupt
        copy(*arguments)

    monkeypatch.setattr(module, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("omniglot", tmp_path, mirror=None, report=silent)
    assert not (tmp_path / "omniglot").exists()  # half of it must not be taken for the set
    monkeypatch.setattr(module, "_copy", copy)
    fetch("omniglot", tmp_path, mirror=None, report=silent)
    assert [asked[0] for asked in server.asked] == ["/images_background.zip", "/images_evaluation.zip"]
    assert {str(p.relative_to(tmp_path / "omniglot")) for p in tmp_path.rglob("*") if p.is_file()} == set(OMNIGLOT)


@pytest.mark.parametrize("there", ["omniglot", "omniglot/images_background/Greek", "omniglot-py/images_evaluation"])
def test_a_folder_that_is_there_but_not_whole_is_left_alone(tmp_path, server, monkeypatch, there):
    publish_omniglot(monkeypatch, server)
    (tmp_path / there).mkdir(parents=True)
    with pytest.raises(UserError, match=r"omniglot(-py)? exists but is incomplete \(.*\); move it away"):
        fetch("omniglot", tmp_path, mirror=None, report=silent)
    assert (server.asked, [p.name for p in tmp_path.iterdir()]) == ([], [there.partition("/")[0]])


def test_two_processes_do_not_fetch_into_one_folder_at_once(tmp_path, server, monkeypatch):
    publish_omniglot(monkeypatch, server)
    raw, said = server.files["/images_background.zip"], []

    def meanwhile(handler):
        with pytest.raises(UserError, match="another process") as caught:
            fetch("omniglot", tmp_path, mirror=None, report=silent)
        said.append(str(caught.value))
        handler.give(raw)

    server.files["/images_background.zip"] = meanwhile
    fetch("omniglot", tmp_path, mirror=None, report=silent)
    assert said == [f"another process is downloading omniglot into {tmp_path}; wait for it to finish"]
    assert [p.name for p in tmp_path.iterdir()] == ["omniglot"]


def test_a_redirection_is_followed_and_continued(tmp_path, server, monkeypatch):
    files = {"a.idx.gz": md5(b"0123456789")}
    set_download(monkeypatch, "mnist", Download(server.address, "mnist", files))

    def elsewhere(handler):
        handler.send_response(302)
        handler.send_header("Location", "/there")
        handler.end_headers()

    def evil(handler):
        handler.send_response(302)
        handler.send_header("Location", "file:///etc/passwd")
        handler.end_headers()

    server.files |= {"/a.idx.gz": evil}
    assert "the server answered 302" in refused("mnist", tmp_path, None)
    cut = [4, None]
    server.files |= {"/a.idx.gz": elsewhere, "/there": lambda handler: handler.give(b"0123456789", cut=cut.pop(0))}
    fetch("mnist", tmp_path, mirror=None, report=silent)
    assert (tmp_path / "mnist" / "a.idx.gz").read_bytes() == b"0123456789"
    assert [asked[1] for asked in server.asked if asked[0] == "/there"] == [None, "bytes=4-"]


def zip_link():
    info = zipfile.ZipInfo("set/link")
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return zipped([("set/a.png", b"x"), (info, b"/etc/passwd")])


EVIL = {
    "tar: a path above": (tarred(("set/a", FILE, b"x"), ("../evil", FILE, b"x")), "points outside its folder"),
    "tar: a path above, inside": (tarred(("set/../../evil", FILE, b"x")), "points outside its folder"),
    "tar: an absolute path": (tarred(("/evil", FILE, b"x")), "points outside its folder"),
    "tar: a backslash": (tarred(("set\\..\\evil", FILE, b"x")), "points outside its folder"),
    "tar: a drive": (tarred(("C:evil", FILE, b"x")), "points outside its folder"),
    "tar: a symbolic link": (tarred(("set/a", tarfile.SYMTYPE, b"")), "is a link"),
    "tar: a pipe": (tarred(("set/a", tarfile.FIFOTYPE, b"")), "is a link, a device or a pipe"),
    "tar: nothing": (tarred(), "has no files below"),
    "tar: cut": (tarred(("set/a", FILE, bytes(range(256)) * 999))[:-400], "is damaged"),
    "zip: a path above": (zipped({"set/a": b"x", "../evil": b"x"}), "points outside its folder"),
    "zip: an absolute path": (zipped({"/evil": b"x"}), "points outside its folder"),
    "zip: a link": (zip_link(), "is a link"),
    "zip: cut": (zipped({"set/a": b"1"})[:-10], "is damaged"),
    "zip: a bomb": (zipped({"set/a": bytes(2 * 10**6)}), "unpacks to 2.0 MB"),
    "tar: a bomb": (tarred(("set/a", FILE, b"x"), ("set/b", FILE, bytes(2 * 10**6))), "unpacks to 2.0 MB"),
}


@pytest.mark.parametrize("which", EVIL)
def test_an_evil_archive_is_refused_and_nothing_is_outside_its_folder(tmp_path, which, monkeypatch):
    monkeypatch.setenv("UNSKEW_UNPACK_LIMIT", "1MB")
    raw, says = EVIL[which]
    name = f"a.{'zip' if which.startswith('zip') else 'tar.gz'}"
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match=says) as caught:
        unpack(tmp_path / name, name, tmp_path / "in")
    assert "\n" not in str(caught.value)
    for path in tmp_path.rglob("*"):
        assert path.is_relative_to(tmp_path / "in") or path.name == name
        assert not path.is_symlink()
        assert path.is_dir() or path.is_file()
        assert not path.name.endswith(".part")


def test_of_an_evil_archive_nothing_stays_in_the_data_folder(tmp_path, server, monkeypatch):
    raw = zipped({"images_background/a.png": b"x", "../evil": b"x"})
    server.files["/a.zip"] = raw
    set_download(monkeypatch, "omniglot", Download(server.address, "omniglot", {"a.zip": md5(raw)}, tree=""))
    assert "points outside its folder" in refused("omniglot", tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_later_names_and_strange_mirrors_are_refused(tmp_path):
    assert "did you mean 'cifar10'?" in refused("cifar11", tmp_path, None)
    assert "is not a web address" in refused("cifar10", tmp_path, "file:///etc")


def test_every_published_set_can_be_fetched_by_checksum():
    downloads = {source.name: source.download for source in sources.SOURCES.values() if source.download}
    named = {source.name for source in sources.SOURCES.values() if not source.path}
    assert set(downloads) == named - {"digits"}
    for wanted in downloads.values():
        assert all(base.endswith("/") for base in (wanted.base, *wanted.mirrors))
        if wanted.splits:
            continue
        assert all(len(checksum) == 32 for checksum in wanted.files.values())
        assert len(wanted.files) == (4 if not wanted.members and wanted.tree is None else len(wanted.files))


def test_published_splits_are_fetched_next_to_the_set_and_stay(tmp_path, server):
    for name in ("inaturalist-user-120k", "inaturalist-geo"):
        train = f"{name}/federated_train_{name[12:]}.csv", f"user_id,image_id,class\n{name},1,0\n"
        server.files[f"/{name}.zip"] = zipped([train, (f"{name}/test.csv", "image_id,class\n2,0\n")])
    said = []

    def get():
        return fetch("inaturalist", tmp_path, mirror=server.address, report=lambda *_: None, say=said.append)

    folder = get()
    assert folder == tmp_path / "inaturalist"
    assert "get its photographs from github.com/visipedia" in said[-1]
    assert read_split("federated_train_geo.csv", folder).users[0] == "inaturalist-geo"
    assert read_split("federated_train_user-120k.csv", folder).paths == ["1", "2"]
    asked = len(server.asked)
    get()
    assert len(server.asked) == asked, "what is there is not fetched again"
    server.files["/inaturalist-geo.zip"] = b"no archive"
    shutil.rmtree(folder / "inaturalist-geo")
    with pytest.raises(UserError, match=r"inaturalist-geo.zip is damaged"):
        get()
    assert sorted(path.name for path in folder.iterdir()) == ["inaturalist-user-120k"]
