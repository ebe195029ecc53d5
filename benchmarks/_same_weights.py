"""Refuses to report times of columns that did not do the same work."""

from collections.abc import Mapping

import keras
import numpy as np

from benchmarks import _cases

# Distance that float32 may put between the weights of two columns in their
# first updates, as a part of the way they have come. Adam enlarges the rounding
# of small gradients, and later ones drift apart.
NUM_UPDATES = 2
MAX_DISTANCE = 1e-4


def check(
    case: _cases.Case,
    models: Mapping[str, keras.Model],
    reference: str,
    max_distance: float = MAX_DISTANCE,
) -> None:
    """Holds the weights of models against those of one of them.

    Args:
        case: What they were made from.
        models: By column, after `NUM_UPDATES` updates each.
        reference: The column that the others are held against.
        max_distance: What is allowed, as a part of the way from the first
            weights to those of the reference.

    Raises:
        RuntimeError: If one of them is farther away.
    """
    expected = _weights(models[reference])
    length = _distance(expected, _weights(case.model()))
    for name, model in models.items():
        distance = _distance(_weights(model), expected) / length
        if not distance < max_distance:
            raise RuntimeError(
                f"{name!r} has trained to other weights than {reference!r}, "
                f"off by {distance:.1e} of the way from the initial ones."
            )


def _weights(model):
    return [variable.numpy() for variable in model.trainable_variables]


def _distance(some, others):
    squares = (
        np.sum(np.square(one - other), dtype="float64")
        for one, other in zip(some, others, strict=True)
    )
    return np.sqrt(sum(squares))
