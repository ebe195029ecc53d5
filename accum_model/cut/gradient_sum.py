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
        measures_noise: True to add up what the gradient noise scale needs.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        accum_dtype: str | None,
        skips_nonfinite: bool = False,
        measures_noise: bool = False,
    ) -> None:
        self._variables = list(variables)
        self._dtypes = [
            accumulator.sum_dtype(v, accum_dtype) for v in self._variables
        ]
        self._skips = skips_nonfinite
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
        after = {
            "sums": [
                _added(variable, total, gradient)
                for variable, total, gradient in zip(
                    self._variables, collected["sums"], gradients, strict=True
                )
            ],
            "weight": collected["weight"] + tf.cast(weight, "float64"),
            "weight_left_out": collected["weight_left_out"],
            "num_rows": collected["num_rows"] + tf.cast(num_rows, "int64"),
            "num_left_out": collected["num_left_out"],
        }
        if self._measures_noise:
            share = tf.cast(num_rows if is_sum else weight, "float64")
            square = noise_scale.square_norm(gradients) / tf.square(share)
            after["noise_sums"] = collected["noise_sums"] + noise_scale.record(
                square, num_rows, share
            )
        if not self._skips:
            return after
        left_out = {
            **collected,
            "weight_left_out": collected["weight_left_out"]
            + tf.cast(weight, "float64"),
            "num_left_out": collected["num_left_out"] + 1,
        }
        is_finite = nonfinite.are_finite(gradients)
        return keras.tree.map_structure(
            lambda one, other: tf.where(is_finite, one, other), after, left_out
        )

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
