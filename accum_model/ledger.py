"""Rows seen and rows applied, for the logs.

Kept only where someone asks for it: counting costs a few scalar operations
per micro-batch.
"""

import keras
import tensorflow as tf


class RowLedger:
    """Counts rows of micro-batches.

    Attributes:
        num_pending: int64 scalar variable, rows in the cycle so far.
        num_applied: int64 scalar variable, rows that went into updates.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self.num_pending = _counter("num_pending_rows")
            self.num_applied = _counter("num_applied_rows")

    def add(self, num_rows: tf.Tensor) -> None:
        """Counts the rows of a micro-batch that does not end its cycle."""
        self.num_pending.assign_add(tf.cast(num_rows, "int64"))

    def settle(self, num_rows: tf.Tensor | int = 0) -> None:
        """Counts the rows of an update: the pending ones and `num_rows`."""
        rows = self.num_pending.value + tf.cast(num_rows, "int64")
        self.num_applied.assign_add(rows)
        self.num_pending.assign(tf.zeros((), "int64"))

    def discard(self) -> None:
        """Forgets the pending rows."""
        self.num_pending.assign(tf.zeros((), "int64"))


def _counter(name: str) -> keras.Variable:
    return keras.Variable(0, dtype="int64", trainable=False, name=name)
