"""Rows and gradient norms, for the logs.

Kept only where someone asks for it: counting costs a few scalar operations
per micro-batch.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import noise_scale
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
        noise: Sums for the gradient noise scale, or None.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        with tf.init_scope():
            with replicas.local_variables():
                self.num_pending = _counter("num_pending_rows")
            with replicas.variables():
                self.num_applied = _counter("num_applied_rows")
                self.last_norm = _counter("last_gradient_norm", "float64")
                self.norm_sum = _counter("gradient_norm_sum", "float64")
        self.noise: noise_scale.NoiseScale | None = None

    def estimate_noise(self, is_on: bool) -> None:
        """Estimates the noise scale or not, in steps compiled from now on."""
        if not is_on:
            self.noise = None
        elif self.noise is None:
            self.noise = noise_scale.NoiseScale(self._replicas)

    def note_micro_batch(
        self,
        gradients: Sequence[Any],
        weight: tf.Tensor,
        num_rows: tf.Tensor,
        scale: Any = None,
        is_sum: bool = False,
        sums: tf.Tensor | None = None,
    ) -> None:
        """Notes the gradients of one call of `apply`, if anyone asks for it.

        Args:
            gradients: Gradients of one micro-batch.
            weight: Its weight.
            num_rows: Its rows; zero if it was left out.
            scale: What gradients are still multiplied by, or None.
            is_sum: True when they are a sum over rows.
            sums: Where these are several micro-batches: their sums, see
                `noise_scale`.
        """
        if self.noise is None:
            return
        if sums is None:
            square = noise_scale.square_norm(gradients)
            if is_sum:
                weight = tf.cast(num_rows, "float64")
                square /= weight * weight
            sums = noise_scale.record(square, num_rows, weight)
        else:
            sums = tf.where(num_rows > 0, sums, tf.zeros_like(sums))
        if scale is not None:
            sums = noise_scale.multiplied(
                sums, 1 / tf.square(tf.cast(scale, "float64"))
            )
        if self._replicas.are_several and not is_sum:
            # Keras has divided a mean by the replicas.
            sums = noise_scale.multiplied(sums, self._replicas.count**2)
        self.noise.add(sums)

    def add(self, num_rows: tf.Tensor) -> None:
        """Counts the rows of a micro-batch."""
        self.num_pending.value.assign_add(tf.cast(num_rows, "int64"))

    def pending(self, num_rows: tf.Tensor | int) -> tf.Tensor:
        """Rows of the replica's cycle with `num_rows` more."""
        return self.num_pending.value + tf.cast(num_rows, "int64")

    def settle(self, num_rows: tf.Tensor) -> None:
        """Counts the rows of an update, of all replicas."""
        self.num_applied.assign_add(tf.cast(num_rows, "int64"))

    def settle_noise(
        self,
        pending: tf.Tensor | None = None,
        num_calls: tf.Tensor | int = 1,
        is_sum: bool = False,
    ) -> None:
        """Takes an update into the noise scale, if anyone asks for it.

        Args:
            pending: Sums of all replicas over its cycle; None for those of the
                only one.
            num_calls: Calls of `apply` in its cycle.
            is_sum: True when the gradient applied is a sum over rows.
        """
        if self.noise is None:
            return
        square = tf.square(self.last_norm.value)
        if pending is not None:
            self.noise.settle(pending, square, num_calls, bool(is_sum))
            return
        pending = self.noise.pending.value
        self.noise.settle(pending, square, num_calls, bool(is_sum))
        self.noise.forget()

    def forget(self) -> None:
        """Starts a new cycle on the replica."""
        self.num_pending.value.assign(tf.zeros((), "int64"))
        if self.noise is not None:
            self.noise.forget()

    def discard(self) -> None:
        """Forgets an unfinished cycle, on all replicas."""
        replicas = self._replicas
        replicas.together(lambda: replicas.on_each(self.forget))

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
    norm = tf.sqrt(noise_scale.square_norm(gradients))
    return norm / tf.cast(scale, "float64")


def _counter(name: str, dtype: str = "int64") -> keras.Variable:
    return keras.Variable(0, dtype=dtype, trainable=False, name=name)
