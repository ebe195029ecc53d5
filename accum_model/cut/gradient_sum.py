"""Sums of gradients over the micro-batches of one step.

Tensors, handed through the loop: faster than variables, and gone when the step
is over.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import accumulator
from accum_model import noise_scale
from accum_model import nonfinite
from accum_model.accumulator import Gradient
from accum_model.micro_batch import MicroBatch

# Sums of gradients, of weights and of rows, and what was left out.
Collected = dict[str, Any]


class Collector:
    """Adds up gradients, and what belongs to them.

    Args:
        variables: Trainable variables.
        accum_dtype: dtype of the sums, or None for float32 (float64 for float64
            variables).
        skips_nonfinite: True to leave out micro-batches with a gradient that is
            not finite; the others then stand for them.
        use_xla: True when XLA compiles the step. Defaults to False.
        measures_noise: True to add up what the gradient noise scale needs.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        accum_dtype: str | None,
        skips_nonfinite: bool = False,
        use_xla: bool = False,
        measures_noise: bool = False,
    ) -> None:
        self._variables = list(variables)
        self._dtypes = [
            accumulator.sum_dtype(v, accum_dtype) for v in self._variables
        ]
        self._skips = skips_nonfinite
        self._use_xla = use_xla
        self._measures_noise = measures_noise
        self._has_gradient = [False] * len(self._variables)

    def zeros(self) -> Collected:
        """What was collected before the first micro-batch."""
        collected = {
            "sums": [
                tf.zeros(variable.shape, dtype)
                for variable, dtype in zip(
                    self._variables, self._dtypes, strict=True
                )
            ],
            "weight": tf.zeros((), "float64"),
            "weight_left_out": tf.zeros((), "float64"),
            "num_rows": tf.zeros((), "int64"),
            "num_left_out": tf.zeros((), "int64"),
        }
        if self._measures_noise:
            collected["noise_sums"] = tf.zeros(
                (noise_scale.NUM_SUMS,), "float64"
            )
        return collected

    def add(
        self,
        collected: Collected,
        gradients: Sequence[Gradient],
        weight: tf.Tensor | float = 0,
        num_rows: tf.Tensor | int = 0,
        is_sum: bool = False,
    ) -> Collected:
        """Returns `collected` with one more micro-batch.

        Args:
            collected: As `zeros` or `add` returned it.
            gradients: One per variable, dense, sparse or None.
            weight: Weight of the micro-batch, scalar.
            num_rows: Its rows.
            is_sum: True when the loss is a sum, and `weight` is one.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._has_gradient[index] = True
        weight = tf.cast(weight, "float64")
        num_rows = tf.cast(num_rows, "int64")
        after = dict(collected)
        if self._skips:
            # Of the gradients, because a choice of sums would copy them.
            is_finite = nonfinite.are_finite(gradients)
            gradients = [nonfinite.where(is_finite, g) for g in gradients]
            is_left_out = tf.logical_not(is_finite)
            after["weight_left_out"] += nonfinite.where(is_left_out, weight)
            after["num_left_out"] += tf.cast(is_left_out, "int64")
            weight = nonfinite.where(is_finite, weight)
            num_rows = nonfinite.where(is_finite, num_rows)
        if self._measures_noise:
            share = num_rows if is_sum else weight
            share = tf.cast(share, "float64")
            square = noise_scale.square_norm(gradients)
            square = tf.math.divide_no_nan(square, tf.square(share))
            after["noise_sums"] += noise_scale.record(square, num_rows, share)
        after["weight"] += weight
        after["num_rows"] += num_rows
        after["sums"] = [
            self._added(variable, total, gradient)
            for variable, total, gradient in zip(
                self._variables, collected["sums"], gradients, strict=True
            )
        ]
        return after

    def finish(self, collected: Collected, batch: MicroBatch) -> list[Gradient]:
        """Returns the gradients of the batch, and tells `batch` about them.

        Args:
            collected: As the last call of `add` returned it.
            batch: Is told its weight, rows, and what was left out.

        Returns:
            One per variable, or None where no micro-batch had any.
        """
        weight = collected["weight"]
        batch.weight = tf.ones_like(weight) if batch.is_sum else weight
        gradients = self.gradients(collected)
        if self._measures_noise:
            batch.noise_sums = self._noise_sums(collected, batch.is_sum)
        if not self._skips:
            return gradients
        batch.num_rows = collected["num_rows"]
        batch.num_skipped = collected["num_left_out"]
        if batch.is_sum:
            batch.weight = tf.minimum(batch.weight, weight)
            return gradients
        # The micro-batches were weighted for all of them to be there.
        factor = tf.math.divide_no_nan(
            weight + collected["weight_left_out"], weight
        )
        return [
            None if each is None else each * tf.cast(factor, each.dtype)
            for each in gradients
        ]

    def _noise_sums(self, collected, is_sum):
        if is_sum:
            return collected["noise_sums"]
        # Gradients were those of shares in the loss of the whole batch.
        total = collected["weight"] + collected["weight_left_out"]
        return noise_scale.multiplied(collected["noise_sums"], tf.square(total))

    def gradients(self, collected: Collected) -> list[Gradient]:
        """The sums, or None where no micro-batch had a gradient."""
        return [
            total if has else None
            for total, has in zip(
                collected["sums"], self._has_gradient, strict=True
            )
        ]

    def _added(self, variable, total, gradient):
        if gradient is None:
            return total
        if accumulator.is_overwritten(variable):
            return tf.maximum(total, tf.cast(gradient, total.dtype))
        if isinstance(gradient, tf.IndexedSlices):
            indices = tf.expand_dims(gradient.indices, -1)
            values = tf.cast(gradient.values, total.dtype)
            if self._use_xla:
                return tf.tensor_scatter_nd_add(total, indices, values)
            # XLA does not know this one; outside, only this one adds in place
            # where it can: the other copies the whole sum each time.
            return tf.raw_ops.ScatterNdNonAliasingAdd(
                input=total, indices=indices, updates=values
            )
        return total + tf.cast(gradient, total.dtype)
