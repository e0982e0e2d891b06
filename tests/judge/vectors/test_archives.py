"""Golden vectors as one file."""

import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from refattn.judge import vectors
from refattn.judge.vectors import archives as _archives
from refattn.judge.vectors import checking

ENDS = (".zip", ".tar.gz")
CONTENT = {"ra.json": b"{}\n", "README.md": b"vectors\n", "manifest-json.json": bytes(range(256))}


def no_vectors(directory, *, format, estimator):
    """Write small files."""
    for name, data in CONTENT.items():
        Path(directory, name).write_bytes(data)
    return [Path(directory, name) for name in CONTENT]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_archives, "write", no_vectors)
        return {end: vectors.pack(folder / f"golden{end}")[0] for end in ENDS}


def unpack(path, folder):
    shutil.unpack_archive(path, folder, **({} if path.suffix == ".zip" else {"filter": "data"}))
    return folder


@pytest.mark.parametrize("end", ENDS)
def test_two_runs_give_the_same_bytes(end, archives, tmp_path, monkeypatch):
    monkeypatch.setattr(_archives, "write", no_vectors)
    [again] = vectors.pack(tmp_path / "new" / f"other{end}")  # whatever its name
    assert again.read_bytes() == archives[end].read_bytes()
    assert [x.name for x in again.parent.iterdir()] == [again.name]


@pytest.mark.parametrize("end", ENDS)
def test_it_holds_what_a_directory_does_and_its_checksums(end, archives, tmp_path):
    found = unpack(archives[end], tmp_path / "found")
    there = {x.name: x.read_bytes() for x in found.iterdir()}
    sums = there.pop("SHA256SUMS").decode().splitlines()
    assert there == CONTENT
    assert sums == sorted(
        (f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in there.items()),
        key=lambda line: line[66:],
    )
    if shutil.which("sha256sum"):
        done = subprocess.run(
            ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=found, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(": OK\n") == len(there)


@pytest.mark.parametrize("end", ENDS)
def test_what_is_inside_depends_on_no_clock_and_no_user(end, archives):
    if end == ".zip":
        infos = zipfile.ZipFile(archives[end]).infolist()
        assert {(x.date_time, x.create_system, x.external_attr >> 16) for x in infos} == {
            ((1980, 1, 1, 0, 0, 0), 3, 0o644)
        }
        names = [x.filename for x in infos]
    else:
        with tarfile.open(archives[end]) as archive:
            members = archive.getmembers()
        assert {(x.mtime, x.uid, x.gid, x.uname, x.gname, x.mode) for x in members} == {
            (0, 0, 0, "", "", 0o644)
        }
        assert archives[end].read_bytes()[4:8] == bytes(4)  # the time of gzip
        names = [x.name for x in members]
    assert names == sorted(names)


def of_coresets(few):
    """Writes one file of vectors."""
    return lambda folder, format, estimator: [*few(format, "coreset", target=folder).iterdir()]


@pytest.mark.parametrize("end", ENDS)
def test_the_linter_reads_archives_and_what_is_unpacked(end, few, tmp_path, monkeypatch):
    monkeypatch.setattr(_archives, "write", of_coresets(few))
    [path] = vectors.pack(tmp_path / f"golden{end}")
    assert vectors.lint(path, fraction=0.01) == []
    with vectors.archives.unpacked(path) as folder:
        assert vectors.load(folder)[0].id == "coreset-basic-float64"
        assert vectors.lint(folder, fraction=0.01) == []
        written = {x.name: x.read_bytes() for x in few("json", "coreset").iterdir()}
        there = {x.name: x.read_bytes() for x in folder.iterdir()}
        assert there.pop("SHA256SUMS")
        assert there == written
    assert not folder.exists()


LINES = b"".join
DAMAGE = [  # a file, what becomes of it, and the words of the linter
    ("README.md", lambda x: x + b" ", "SHA256SUMS: does not match README.md"),
    ("SHA256SUMS", lambda x: x.replace(b"a", b"b", 1), "SHA256SUMS: does not match "),
    ("ra.json", lambda x: None, "SHA256SUMS: does not match ra.json"),
    ("more.json", lambda x: b"{}", "SHA256SUMS: does not match more.json"),
    ("SHA256SUMS", lambda x: LINES(x.splitlines(True)[::-1]), "SHA256SUMS: was changed"),
    ("../more.json", lambda x: b"{}", "'../more.json', which is no plain file"),
]


@pytest.mark.parametrize(("name", "edit", "words"), DAMAGE)
def test_damage_is_named(name, edit, words, archives, tmp_path, monkeypatch):
    with zipfile.ZipFile(archives[".zip"]) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content[name] = edit(content.get(name))
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            if data is not None:
                archive.writestr(name, data)
    monkeypatch.setattr(checking, "read_vectors", lambda kind, path: 1 / 0)  # of no interest here
    assert words in "\n".join(vectors.lint(path))


def test_what_is_no_archive_of_plain_files_is_refused(archives, tmp_path):
    for end in ENDS:
        cut = tmp_path / f"cut{end}"
        cut.write_bytes(archives[end].read_bytes()[:-40])
        [said] = vectors.lint(cut)
        assert said.startswith(f"{cut}: cannot be read")
        [said] = vectors.lint(tmp_path / f"none{end}")
        assert "cannot be read" in said
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(link)
    path = tmp_path / "link.tar.gz"
    path.write_bytes(gzip.compress(file.getvalue()))
    assert vectors.lint(path) == [f"{path}: has 'link', which is no plain file."]


def test_command_line(tmp_path, monkeypatch, few, command):
    monkeypatch.setattr(_archives, "write", of_coresets(few))
    monkeypatch.setattr(_archives, "export", no_vectors)
    path, plain = tmp_path / "golden.zip", tmp_path / "plain"
    status, said = command(path)
    assert (status, said.startswith(f"{path}: 1 files, ")) == (0, True)
    assert command(tmp_path / "header.tar.gz", "--format", "c")[0] == 0
    assert command(path, "--check") == (0, f"{path}: no problems\n")
    path.write_bytes(path.read_bytes()[:-100])
    status, said = command(path, "--check")
    assert (status, "cannot be read" in said) == (1, True)
    plain.touch()
    status, said = command(plain)
    assert (status, "is a file, neither .zip nor .tar.gz" in said) == (2, True)
