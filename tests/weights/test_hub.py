"""Ids of the Hub: from a cache that is already filled, and from a server of our own that speaks its protocol.

huggingface_hub reads its settings when it is imported, so each case runs in a process of its own.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from inms_jax.errors import WeightsError
from inms_jax.weights.hub import is_hub_id
from inms_jax.weights.source import resolve

Tensors = dict[str, np.ndarray]
Write = Callable[..., Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from pathlib import Path
from inms_jax.errors import WeightsError
from inms_jax.weights import load
try:
    model = load(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=False)
except WeightsError as error:
    print("WeightsError", error)
else:
    print(model.model_id, model.weights_version, float(model.params["embed"].sum()))
"""


def run(spec: str, tmp_path: Path, **settings: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **settings}
    command = [sys.executable, "-c", SCRIPT, spec, str(tmp_path / "c")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fill_cache(source: Path, tmp_path: Path) -> None:
    """What an earlier download left in the Hub's cache, links and all."""
    repository = tmp_path / "hf" / "hub" / "models--someone--tiny"
    for folder in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in source.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (repository / "snapshots" / COMMIT / file.name).symlink_to(blob)


@pytest.mark.parametrize("shards", [0, 2])
def test_a_filled_cache_is_enough(shards: int, tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    fill_cache(write_directory(tensors, shards=shards), tmp_path)
    name, version, total = run("someone/tiny", tmp_path, HF_HUB_OFFLINE="1").split()
    assert (name, len(version)) == ("someone/tiny", 64)
    assert float(total) == pytest.approx(float(tensors["model.embed_tokens.weight"].sum()), rel=1e-4)
    pinned = run(f"someone/tiny@{COMMIT}", tmp_path, HF_HUB_OFFLINE="1")
    assert pinned.split()[1:] == [version, total]
    said = run("someone/tiny@v2", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("WeightsError Model 'someone/tiny@v2' is not on this disk and cannot be had")
    assert "LocalEntryNotFoundError" in said


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's protocol as a download takes, for the files of one directory."""

    directory: Path
    asked: list[str]

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        files = sorted(self.directory.iterdir())
        if path in ("/api/models/someone/tiny", "/api/models/someone/tiny/revision/main"):
            siblings = [{"rfilename": file.name} for file in files]
            info = {"id": "someone/tiny", "sha": COMMIT, "siblings": siblings, "private": False}
            self.send(json.dumps(info).encode(), {}, body=body)
        elif path.startswith("/api/models/someone/tiny/tree/"):
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files]
            self.send(json.dumps(tree).encode(), {}, body=body)
        elif path.startswith(f"/someone/tiny/resolve/{COMMIT}/") and (self.directory / path.split("/")[-1]).is_file():
            name = path.split("/")[-1]
            content = (self.directory / name).read_bytes()
            self.asked.append(name)
            headers = {"ETag": hashlib.sha1(content).hexdigest(), "X-Repo-Commit": COMMIT}
            self.send(content, headers, body=body)
        else:
            self.send(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, 404, body=body)

    def send(self, content: bytes, headers: dict[str, str], status: int = 200, *, body: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tensors: Tensors, write_directory: Write) -> Iterator[tuple[str, list[str]]]:
    directory = write_directory(tensors, shards=2)
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "consolidated.safetensors").write_bytes(b"the same weights once more")
    asked: list[str] = []
    handler = type("OneHub", (Hub,), {"directory": directory, "asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def test_what_is_fetched_and_what_is_not_found(hub: tuple[str, list[str]], tensors: Tensors, tmp_path: Path) -> None:
    endpoint, asked = hub
    name, version, total = run("someone/tiny", tmp_path, HF_ENDPOINT=endpoint).split()
    assert name == "someone/tiny"
    assert float(total) == pytest.approx(float(tensors["model.embed_tokens.weight"].sum()), rel=1e-4)
    assert set(asked) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert run("someone/tiny", tmp_path, HF_HUB_OFFLINE="1").split()[1] == version
    said = run("someone/else", tmp_path, HF_ENDPOINT=endpoint)
    assert said.startswith("WeightsError Model 'someone/else' is not on this disk and cannot be had")
    assert "RepositoryNotFoundError" in said


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match=r'\'someone/tiny\' is not on this disk.*pip install "inms-jax\[hub\]"'):
        resolve("someone/tiny", tmp_path)


def test_what_is_on_disk_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert resolve("someone/tiny", tmp_path) == ("tiny", Path("someone/tiny"))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("owner/name", True),
        ("Qwen/Qwen2.5-0.5B-Instruct@refs/pr/1", True),
        ("name", False),
        ("./owner/name", False),
        ("/owner/name", False),
        ("../name", False),
        ("a/b/c", False),
        ("owner/name@", False),
        ("owner/name.gguf", False),
        ("owner/name@../../x", False),
        ("owner/name@v1/../../x", False),
    ],
)
def test_ids(spec: str, expected: bool) -> None:
    assert is_hub_id(spec) is expected
