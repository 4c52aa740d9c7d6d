"""The quality gate of fragments: what they cost a model, measured, and whether that is little enough.

A gate is a JSON file of one model with one version of its weights and one dtype. Gates of known models come with the
package; `inms-jax calibrate` writes others. Knows nothing of how they are measured.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from inms_jax.errors import ConfigError
from inms_jax.memory.fingerprint import CacheIdentity

FORMAT = 1
MAX_KL = 0.05
"""Nats per token, of recall and of running text."""
MIN_TOP1 = 0.9
"""Least share of tokens whose most likely choice stays, of recall and of running text."""
MIN_JUDGE = 0.9
"""Least share of a judge's choices that stay."""
SHIPPED = Path(__file__).parent.parent / "configs/gates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Fragments after one kind of root against dense: KL in nats, the rest as shares from 0 to 1."""

    probes: int
    recall_kl: float
    recall_top1: float
    text_kl: float
    text_top1: float
    judge_consistency: float

    def failures(self) -> list[str]:
        """What is not good enough, with the numbers; empty when it passes."""
        found = []
        for name, value, least in (
            ("recall_top1", self.recall_top1, MIN_TOP1),
            ("text_top1", self.text_top1, MIN_TOP1),
            ("judge_consistency", self.judge_consistency, MIN_JUDGE),
        ):
            if not value >= least:
                found.append(f"{name} is {value:.3f}, at least {least} is asked")
        for name, value in (("recall_kl", self.recall_kl), ("text_kl", self.text_kl)):
            if not value <= MAX_KL:
                found.append(f"{name} is {value:.4f}, at most {MAX_KL} is asked")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What `inms-jax calibrate` found. rooted: after a root of published text. bos: after BOS alone, where the model
    has such a token. link_tokens: computed in place at the start of each fragment while it was measured.
    """

    model_id: str
    weights_version: str
    dtype: str
    link_tokens: int
    rooted: Quality
    bos: Quality | None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Gate":
        """ConfigError, naming `where`, unless `value` is one."""
        try:
            if value["format"] != FORMAT:
                raise ConfigError(f"{where} has format {value['format']}, this version reads {FORMAT}: calibrate again")
            given = {field.name: value[field.name] for field in fields(cls)}
            given["rooted"] = Quality(**given["rooted"])
            given["bos"] = None if given["bos"] is None else Quality(**given["bos"])
            return cls(**given)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where} is no gate of a model ({error!r}): delete it and calibrate again") from error

    def write(self, cache: Path) -> Path:
        """Keep it for the engines of this model, in place of an older one."""
        path = cache / "gates" / _file_name(self.model_id, self.weights_version, self.dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        return path


def find_gate(model_id: str, weights_version: str, dtype: str, cache: Path) -> Gate | None:
    """The gate of this very model, calibrated here or shipped with the package."""
    name = _file_name(model_id, weights_version, dtype)
    for path in (cache / "gates" / name, SHIPPED / name):
        if path.is_file():
            try:
                value = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is no JSON: delete it and calibrate again") from error
            gate = Gate.from_json(value, str(path))
            if (gate.model_id, gate.weights_version, gate.dtype) == (model_id, weights_version, dtype):
                return gate
    return None


def _file_name(*identity: str) -> str:
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    readable = "".join(c if c.isalnum() or c in "-._" else "-" for c in identity[0].rsplit("/", 1)[-1])
    return f"{readable[:60]}-{digest}.json"


@dataclass(frozen=True, slots=True)
class Permission:
    """Whether an engine may read fragments: `refusal` says why not. after_bos: those without a root, too.

    link_tokens: the fewest that each must have.
    """

    refusal: str | None
    after_bos: bool = True
    link_tokens: int = 0


def permission(mode: str, link_tokens: int, identity: CacheIdentity, cache: Path) -> Permission:
    """What EngineConfig.fragments and the gate of the model allow together."""
    if mode == "unchecked":
        return Permission(None)
    if mode == "off":
        return Permission('fragments are off in this engine: LLM(..., fragments="calibrated") allows them', False)
    gate = find_gate(identity.model_id, identity.weights_version, identity.dtype, cache)
    refusal = _refusal(gate, identity, link_tokens)
    if gate is None or refusal is not None:
        return Permission(refusal, False)
    return Permission(None, gate.bos is not None and not gate.bos.failures(), gate.link_tokens)


def _refusal(gate: Gate | None, identity: CacheIdentity, link_tokens: int) -> str | None:
    if gate is None:
        return (
            f"fragments were never measured with {identity.model_id!r} in {identity.dtype}: run `inms-jax calibrate` "
            'on it once, or allow them all the same with LLM(..., fragments="unchecked")'
        )
    if link_tokens < gate.link_tokens:
        return (
            f"fragments were measured with {gate.link_tokens} link tokens and this engine has {link_tokens}: raise "
            f"link_tokens, or run `inms-jax calibrate` with --link-tokens {link_tokens}"
        )
    if failures := gate.rooted.failures():
        return (
            f"fragments are not good enough with {identity.model_id!r}: {'; '.join(failures)}. More link tokens may "
            'help; LLM(..., fragments="unchecked") allows them all the same'
        )
    return None
