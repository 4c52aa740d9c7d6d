"""Frozen dataclasses as pytrees: the form of all device state.

Unlike `jax.tree_util.register_dataclass`, rebuilding a tree does not run `__init__`, so the shape annotations
of the fields are checked when code builds a state and not when jax maps a tree to placeholders. Knows no
particular state.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def register_state(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a pytree; fields whose metadata has `static=True` go to the tree
    structure.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    static = tuple(field.name for field in fields if field.metadata.get("static", False))
    data = tuple(field.name for field in fields if field.name not in static)

    def flatten_with_keys(state: T) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in data)
        return children, tuple(getattr(state, name) for name in static)

    def flatten(state: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(state, name) for name in data), tuple(getattr(state, name) for name in static)

    def unflatten(aux: tuple[Any, ...], children: Iterable[Any]) -> T:
        state = object.__new__(cls)
        for name, value in zip(data + static, (*children, *aux), strict=True):
            object.__setattr__(state, name, value)
        return state

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree structure: hashable, and a new value compiles anew."""
    return dataclasses.field(metadata={"static": True}, **kwargs)
