"""Models on disk: where they come from, how their files are read, and the converted form that is loaded."""

from inms_jax.weights.load import LoadedModel, load
from inms_jax.weights.source import ModelListing, list_models
from inms_jax.weights.store import default_cache_dir

__all__ = ["LoadedModel", "ModelListing", "default_cache_dir", "list_models", "load"]
