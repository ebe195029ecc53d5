"""Optimizers that hold optimizers, from the outside inwards."""

from collections.abc import Iterator
from typing import TypeVar

import keras

T = TypeVar("T", bound=keras.optimizers.Optimizer)


def chain(
    optimizer: keras.optimizers.Optimizer | None,
) -> Iterator[keras.optimizers.Optimizer]:
    """`optimizer`, the one it holds, and so on to the innermost."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def innermost(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """The optimizer that moves the weights."""
    return list(chain(optimizer))[-1]


def find(
    optimizer: keras.optimizers.Optimizer | None, cls: type[T]
) -> T | None:
    """The outermost `cls` at any depth, or None."""
    return next((o for o in chain(optimizer) if isinstance(o, cls)), None)
