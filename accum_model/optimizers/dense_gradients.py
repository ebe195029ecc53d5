"""Sparse gradients as the dense ones they stand for.

A `tf.IndexedSlices` may name a row several times. Squares, norms and clipping
are only right once the parts of a row are added up.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model.accumulator import Gradient


def merged(
    grads: Sequence[Gradient], variables: Sequence[keras.Variable]
) -> list[tf.Tensor | None]:
    """Returns dense gradients, one per variable; None stays None."""
    return [
        _dense(gradient, variable)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient
        for gradient, variable in zip(grads, variables, strict=True)
    ]


def _dense(gradient, variable):
    return tf.math.unsorted_segment_sum(
        gradient.values, gradient.indices, variable.shape[0]
    )
