"""Gradients that are not finite: kept out, counted, acted on.

A micro-batch with an infinite or NaN gradient leaves the buffers as they are,
numerator and denominator alike. Nothing is multiplied by zero, which NaN would
survive: values are selected.
"""

from collections.abc import Callable
from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model.accumulator import Accumulator
from accum_model.accumulator import Gradient

POLICIES = (None, "skip_micro_batch", "skip_update", "raise")


class Guard:
    """Keeps what is not finite out of the buffers.

    Args:
        policy: `"skip_micro_batch"`: the cycle goes on without it.
            `"skip_update"`: the cycle is discarded at its usual end.
            `"raise"`: an error.
        add_variable: Makes a variable of the owning optimizer.

    Attributes:
        num_skipped_micro_batches: int64 scalar variable, since the start, in
            cycles that are over.
        num_skipped_updates: int64 scalar variable, since the start.
    """

    def __init__(
        self, policy: str, add_variable: Callable[..., keras.Variable]
    ) -> None:
        self.policy = policy
        self.num_skipped_micro_batches = add_variable(
            (), dtype="int64", name="skipped_micro_batches"
        )
        self.num_skipped_updates = add_variable(
            (), dtype="int64", name="skipped_updates"
        )

    def select(
        self,
        cycle: Accumulator,
        grads: Sequence[Gradient],
        weight: tf.Tensor,
        num_skipped: tf.Tensor | int = 0,
    ) -> tuple[list[Gradient], tf.Tensor, tf.Tensor, tf.Tensor]:
        """Replaces a bad micro-batch by nothing.

        Of several replicas each looks at its own.

        Args:
            cycle: The cycle of the micro-batch.
            grads: Its gradients.
            weight: Its weight, scalar.
            num_skipped: How many parts of it were left out already because
                their gradients were not finite.

        Returns:
            Gradients and weight, zero if any of them was not finite; a bool
            scalar, True if all were; and how many were not, this micro-batch
            or parts of it.
        """
        is_finite = are_finite([*grads, weight])
        if self.policy == "raise":
            tf.debugging.Assert(
                is_finite,
                [
                    "A gradient is not finite in micro-batch",
                    cycle.position.value + 1,
                    "of the cycle. Pass nonfinite='skip_micro_batch' or "
                    "'skip_update' to go on without it.",
                ],
            )
        num_bad = tf.cast(tf.logical_not(is_finite), "int64") + num_skipped
        num_bad = tf.cast(num_bad, cycle.weight_dtype)
        cycle.num_spoiled.value.assign_add(num_bad)
        return (
            [where(is_finite, gradient) for gradient in grads],
            tf.where(is_finite, weight, tf.zeros_like(weight)),
            is_finite,
            num_bad,
        )

    def must_discard(self, num_bad: tf.Tensor) -> tf.Tensor:
        """True when a cycle with so many bad micro-batches is not applied."""
        if self.policy == "skip_micro_batch":
            return tf.constant(False)
        return num_bad > 0

    def count(self, num_bad: tf.Tensor) -> None:
        """Counts the bad micro-batches of a cycle that is over."""
        self.num_skipped_micro_batches.assign_add(tf.cast(num_bad, "int64"))

    def count_discarded(self, num_bad: tf.Tensor) -> None:
        """Counts a cycle that is discarded, if that is because it is bad."""
        self.num_skipped_updates.assign_add(tf.cast(num_bad > 0, "int64"))

    def state(self) -> dict[str, keras.Variable]:
        """All variables by the name under which they are saved."""
        return {
            "skipped_micro_batches": self.num_skipped_micro_batches,
            "skipped_updates": self.num_skipped_updates,
        }


def are_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """True when every number in them is finite, bool scalar."""
    return tf.reduce_all(
        [
            tf.reduce_all(tf.math.is_finite(_values(gradient)))
            for gradient in gradients
            if gradient is not None
        ]
    )


def where(condition: tf.Tensor, gradient: Gradient) -> Gradient:
    """The gradient where `condition` is True, else zeros of its kind."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.where(
            condition, gradient.values, tf.zeros_like(gradient.values)
        )
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    return tf.where(condition, gradient, tf.zeros_like(gradient))


def lower_loss_scale(
    optimizer: keras.optimizers.LossScaleOptimizer, condition: tf.Tensor
) -> None:
    """Halves the loss scale where `condition` is True, as Keras does."""
    scale, steps = optimizer.dynamic_scale, optimizer.step_counter
    scale.assign(tf.where(condition, scale.value * 0.5, scale.value))
    steps.assign(tf.where(condition, tf.zeros_like(steps.value), steps.value))


def _values(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient
