"""Rows and gradient norms, for the logs.

Kept only where someone asks for it: counting costs a few scalar operations
per micro-batch.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model.replicas import Replicas


class RowLedger:
    """Counts rows of micro-batches, and adds up the norms of updates.

    Args:
        replicas: Those whose rows are counted.

    Attributes:
        num_pending: int64 scalar variable, rows of the replica in the cycle so
            far.
        num_applied: int64 scalar variable, rows that went into updates.
        last_norm: float64 scalar variable, global norm of the last update's
            averaged gradient, before any clipping.
        norm_sum: float64 scalar variable, sum of those norms.
    """

    def __init__(self, replicas: Replicas) -> None:
        with tf.init_scope():
            with replicas.local_variables():
                self.num_pending = _counter("num_pending_rows")
            with replicas.variables():
                self.num_applied = _counter("num_applied_rows")
                self.last_norm = _counter("last_gradient_norm", "float64")
                self.norm_sum = _counter("gradient_norm_sum", "float64")

    def add(self, num_rows: tf.Tensor) -> None:
        """Counts the rows of a micro-batch that does not end its cycle."""
        self.num_pending.value.assign_add(tf.cast(num_rows, "int64"))

    def pending(self, num_rows: tf.Tensor | int = 0) -> tf.Tensor:
        """Rows of the replica's cycle with `num_rows` more."""
        return self.num_pending.value + tf.cast(num_rows, "int64")

    def settle(self, num_rows: tf.Tensor) -> None:
        """Counts the rows of an update, of all replicas."""
        self.num_applied.assign_add(tf.cast(num_rows, "int64"))

    def forget(self) -> None:
        """Starts counting the replica's rows of a new cycle."""
        self.num_pending.value.assign(tf.zeros((), "int64"))

    def note_norm(self, norm: tf.Tensor) -> None:
        """Notes the global norm of an update's averaged gradient."""
        self.last_norm.assign(norm)
        self.norm_sum.assign_add(norm)


def global_norm(gradients: Sequence[Any], scale: Any = 1) -> tf.Tensor:
    """The square root of the sum of squares, float64 scalar.

    Args:
        gradients: Dense or sparse gradients, with repeated ids or without.
        scale: What the gradients are still multiplied by.
    """
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
    squares = [
        tf.cast(tf.reduce_sum(tf.square(gradient)), "float64")
        for gradient in dense
    ]
    return tf.sqrt(tf.add_n(squares)) / tf.cast(scale, "float64")


def _counter(name: str, dtype: str = "int64") -> keras.Variable:
    return keras.Variable(0, dtype=dtype, trainable=False, name=name)
