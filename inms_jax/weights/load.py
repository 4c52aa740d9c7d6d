"""One call from the name of a model to everything an engine needs of it, or an error and nothing.

The first load converts the files into the cache; later ones map the converted arrays and read neither weights nor
vocabulary of the original again. A checkpoint of `inms-jax convert` is restored straight to its devices.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inms_jax.models.config import ModelConfig
from inms_jax.text.chat import ChatTemplate
from inms_jax.text.tokenizer import SpecialTokens, Tokenizer
from inms_jax.weights.blocks import named_dtype
from inms_jax.weights.origin import Origin
from inms_jax.weights.record import CheckpointRecord, Place, is_checkpoint
from inms_jax.weights.source import resolve
from inms_jax.weights.store import ConvertedModel, default_cache_dir
from inms_jax.weights.tree import nest, tensor_specs


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """`params` is a tree of arrays with stacked layers, `weights_version` names their bytes.

    The arrays are read-only numpy arrays where the host's memory is the place for them, else `jax.Array`s.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    weights_version: str
    model_id: str


def load(
    spec: str | Path,
    *,
    dtype: str = "float32",
    cache_dir: Path | None = None,
    progress: bool = True,
    place: Place | None = None,
    on_host: bool = False,
) -> LoadedModel:
    """Load a known model by name, a `.gguf` file, a Hugging Face directory, a model of the Hub by its id, or what
    `inms-jax convert` wrote.

    `place(name)` is the sharding of the tensor "embed", "layers/q", ... ; without it a checkpoint is put on the default
    device, unless `on_host`, and everything else left on the host. Raises `WeightsError` (of which
    `UnsupportedModelError` is a kind) or `ConfigError`, naming the file and the tensor or attribute.
    """
    named_dtype(dtype)
    cache = cache_dir or default_cache_dir()
    model_id, path = resolve(spec, cache, progress=progress)
    if is_checkpoint(path):
        return _restored(path, dtype, place, on_host)
    origin = Origin.of(model_id, path, cache)
    converted = ConvertedModel(cache, f"{model_id}\0{origin.identity}", dtype)
    if not converted.exists():
        opened = origin.open()
        converted.write(opened.config, opened.metadata, opened.rows, progress=progress)
    config, metadata, params = converted.read()
    if place is not None:
        params = _placed(config, params, place)
    return _loaded(config, metadata, params, origin.weights_version, model_id)


def _placed(config: ModelConfig, params: dict[str, Any], place: Place) -> dict[str, Any]:
    """The same tree on devices; a mapping is let go once its tensor is there, for what is mapped stays in memory."""
    import jax

    flat = {}
    for spec in tensor_specs(config):
        group, _, leaf = spec.name.rpartition("/")
        value = (params[group] if group else params).pop(leaf)
        flat[spec.name] = jax.device_put(value, place(spec.name)).block_until_ready()
        del value
    return nest(flat)


def _restored(path: Path, dtype: str, place: Place | None, on_host: bool) -> LoadedModel:
    import jax

    from inms_jax.weights.checkpoint import read_params

    record = CheckpointRecord.read(path)
    device = jax.local_devices(backend="cpu" if on_host else None)[0]
    alone = jax.sharding.SingleDeviceSharding(device)
    params = read_params(path, record, dtype, place or (lambda _: alone))
    if place is None and device.platform == "cpu":
        params = jax.tree.map(np.asarray, params)  # views of the same memory
    return _loaded(record.config, record.metadata, params, record.weights_version, record.model_id)


def _loaded(
    config: ModelConfig, metadata: Mapping[str, Any], params: dict[str, Any], weights_version: str, model_id: str
) -> LoadedModel:
    special = metadata["special"]
    template = metadata["chat_template"]
    return LoadedModel(
        config=config,
        params=params,
        tokenizer=Tokenizer(metadata["tokenizer"], SpecialTokens(**{**special, "eos_ids": tuple(special["eos_ids"])})),
        chat_template=None if template is None else ChatTemplate(**template),
        weights_version=weights_version,
        model_id=model_id,
    )
