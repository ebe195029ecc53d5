"""Sums of gradients over the micro-batches of one step.

Tensors, handed through the loop: faster than variables, and gone when the step
is over.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model import accumulator
from accum_model.accumulator import Gradient


def zeros(
    variables: Sequence[keras.Variable], accum_dtype: str | None
) -> list[tf.Tensor]:
    """One sum per variable, of its shape.

    Args:
        variables: Trainable variables.
        accum_dtype: dtype of the sums, or None for float32 (float64 for float64
            variables).
    """
    return [
        tf.zeros(v.shape, accumulator.sum_dtype(v, accum_dtype))
        for v in variables
    ]


def add(
    variables: Sequence[keras.Variable],
    sums: Sequence[tf.Tensor],
    gradients: Sequence[Gradient],
) -> list[tf.Tensor]:
    """Returns `sums` with the gradients of one more micro-batch.

    Args:
        variables: Trainable variables.
        sums: One sum per variable.
        gradients: One gradient per variable, dense, sparse or None.
    """
    return [
        _added(variable, total, gradient)
        for variable, total, gradient in zip(
            variables, sums, gradients, strict=True
        )
    ]


def _added(variable, total, gradient):
    if gradient is None:
        return total
    if accumulator.is_overwritten(variable):
        return tf.maximum(total, tf.cast(gradient, total.dtype))
    if isinstance(gradient, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(
            total,
            tf.expand_dims(gradient.indices, -1),
            tf.cast(gradient.values, total.dtype),
        )
    return total + tf.cast(gradient, total.dtype)
