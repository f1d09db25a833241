import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from unskew.core.errors import UserError
from unskew.data import fetch as module
from unskew.data import sources
from unskew.data.fetch import DOWNLOADS, Download, fetch


@pytest.fixture
def server(monkeypatch):
    """A web server on this machine; ``server.files`` maps a path to its bytes, or to what the handler shall do."""
    monkeypatch.setenv("no_proxy", "*")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer = self.server.files.get(self.path)
            if answer is None:
                self.send_error(404)
            elif callable(answer):
                answer(self)
            else:
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.files, running.address = {}, f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def silent(done, total):
    pass


def refused(name, folder, mirror):
    with pytest.raises(UserError) as caught:
        fetch(name, folder, mirror=mirror, report=silent)
    assert "\n" not in str(caught.value)
    assert [p for p in folder.rglob("*") if p.is_file()] == []
    return str(caught.value)


def md5(raw):
    return hashlib.md5(raw).hexdigest()


def tar(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
        link = tarfile.TarInfo("cifar-100-binary/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return packed.getvalue()


def publish(monkeypatch, server, name, archive, raw):
    """Put ``raw`` on the server as the published archive of a set."""
    old = DOWNLOADS[name]
    monkeypatch.setitem(DOWNLOADS, name, Download(old.base, old.folder, {archive: md5(raw)}, old.members))
    server.files[f"/{archive}"] = raw


RECORD = b"\x01\x02" + bytes(3072)
CIFAR100 = {"cifar-100-binary/train.bin": RECORD * 3, "cifar-100-binary/test.bin": RECORD}


def test_an_archive_is_fetched_unpacked_and_read(tmp_path, server, monkeypatch):
    raw = tar({"../evil.bin": b"x", "/evil.bin": b"x", "cifar-100-binary/fine_label_names.txt": b"apple\n"} | CIFAR100)
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
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("../evil.gz", b"x")
        archive.writestr("gzip/emnist-balanced-mapping.txt", b"x")
        for split in ("balanced", "byclass", "bymerge", "digits", "letters", "mnist"):
            write_idx(tmp_path / "made", f"emnist-{split}-", "test", first=int(split == "letters"))
        for path in (tmp_path / "made").iterdir():
            archive.writestr(f"gzip/{path.name}", path.read_bytes())
    publish(monkeypatch, server, "emnist-letters", "gzip.zip", packed.getvalue())
    folder = fetch("emnist-letters", tmp_path / "data", mirror=server.address, report=silent)
    assert len(list(folder.iterdir())) == 24
    assert not list(tmp_path.rglob("evil*"))
    assert len(sources.load("emnist", tmp_path / "data").train) == 7


def test_the_four_files_of_mnist_are_fetched_one_by_one(tmp_path, server, monkeypatch, write_idx):
    write_idx(tmp_path / "made")
    raws = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    server.files.update({f"/mnist/{name}": raw for name, raw in raws.items()})
    files = {name: md5(raw) for name, raw in raws.items()}
    monkeypatch.setitem(DOWNLOADS, "mnist", Download("https://absent.invalid/", "mnist", files))
    folder = fetch("mnist", tmp_path / "data", mirror=f"{server.address}/mnist", report=silent)
    assert sorted(p.name for p in folder.iterdir()) == sorted(raws)
    assert len(sources.load("mnist", tmp_path / "data").test) == 3


def test_another_checksum_is_refused_and_nothing_is_kept(tmp_path, server):
    server.files["/cifar-10-binary.tar.gz"] = tar(CIFAR100)
    message = refused("cifar10", tmp_path, server.address)
    assert "is not the published file" in message
    assert "c32a1d4ab5d03f1284b67883e8d87530" in message


def test_an_archive_without_its_members_is_refused(tmp_path, server, monkeypatch):
    publish(monkeypatch, server, "cifar100", "cifar-100-binary.tar.gz", tar({"other": b"x"}))
    assert "lacks cifar-100-binary/test.bin, cifar-100-binary/train.bin" in refused(
        "cifar100", tmp_path, server.address
    )


@pytest.mark.parametrize("name", ["cifar100", "emnist"])
def test_an_archive_that_is_none_is_refused(tmp_path, server, monkeypatch, name):
    (archive,) = DOWNLOADS[name].files
    publish(monkeypatch, server, name, archive, b"no archive")
    assert f"{archive} is damaged inside" in refused(name, tmp_path, server.address)


def test_an_archive_damaged_inside_leaves_no_half_file(tmp_path, server, monkeypatch):
    raw = bytearray(tar({"cifar-100-binary/train.bin": hashlib.sha512(b"").digest() * 9000}))
    raw[len(raw) // 2 :] = bytes(100)
    publish(monkeypatch, server, "cifar100", "cifar-100-binary.tar.gz", bytes(raw))
    assert "cifar-100-binary.tar.gz" in refused("cifar100", tmp_path, server.address)


def test_a_file_the_server_has_not_is_said_with_its_answer(tmp_path, server):
    message = refused("cifar10", tmp_path, server.address)
    assert f"{server.address}/cifar-10-binary.tar.gz: the server answered 404" in message


def test_a_refused_connection_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "cannot be reached: " in refused("cifar10", tmp_path, f"http://127.0.0.1:{port}")


def test_a_body_that_breaks_off_is_said(tmp_path, server):
    def half(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 400)

    server.files["/cifar-10-binary.tar.gz"] = half
    assert "broke off" in refused("cifar10", tmp_path, server.address)


def test_a_chunked_body_that_breaks_off_is_said(tmp_path, server):
    def half(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"ff\r\nhalf")

    server.files["/cifar-10-binary.tar.gz"] = half
    assert "broke off" in refused("cifar10", tmp_path, server.address)


def test_a_silent_server_is_given_up(tmp_path, server, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    asleep = threading.Event()
    server.files["/cifar-10-binary.tar.gz"] = lambda handler: asleep.wait(5)
    message = refused("cifar10", tmp_path, server.address)
    asleep.set()
    assert "timed out" in message


def test_a_data_folder_that_cannot_be_written_is_said(tmp_path, server):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: .*give another --data-dir"):
        fetch("cifar10", tmp_path / "file", mirror=server.address, report=silent)


def test_an_interrupted_download_leaves_nothing(tmp_path, server):
    server.files["/cifar-10-binary.tar.gz"] = bytes(1000)

    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path, mirror=server.address, report=interrupt)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("name", ["digits", "folder:pictures", "arrays:set.npz"])
def test_what_lies_here_already_is_not_to_be_fetched(tmp_path, name):
    assert "there is nothing to fetch" in refused(name, tmp_path, None)


def test_unknown_names_later_names_and_strange_mirrors_are_refused(tmp_path):
    assert "did you mean 'cifar10'?" in refused("cifar11", tmp_path, None)
    assert "get it from github.com/cvdfoundation/google-landmark" in refused("landmarks", tmp_path, None)
    assert "is not a web address" in refused("cifar10", tmp_path, "file:///etc")


def test_every_published_set_can_be_fetched_by_checksum():
    assert set(DOWNLOADS) == set(sources.SOURCES) - {"digits"}
    for download in DOWNLOADS.values():
        assert download.base.endswith("/")
        assert all(len(checksum) == 32 for checksum in download.files.values())
        assert len(download.files) == (1 if download.members else 4)
