"""Heun's method: a step along the mean of the slopes at both of its ends.

.. math:: w \\leftarrow w - \\frac{\\alpha}{2}
    \\bigl(g(w) + g(w - \\alpha g(w))\\bigr)

The explicit trapezoidal rule for the gradient flow :math:`\\dot w = -g(w)`, of
order 2: Hairer, Norsett, Wanner, "Solving Ordinary Differential Equations I",
section II.1, eq. (1.5).
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model.two_point import TwoPointOptimizer


@keras.saving.register_keras_serializable(package="accum_model")
class Heun(TwoPointOptimizer):
    """Gradient descent by steps of second order, with two gradients each.

    Both gradients are taken on the same rows, with the same random numbers.
    Works in an `AccumModel`, or with an `AccumCallback`, where Keras's own
    `train_step` is used; with `micro_batch_size`, but not with `accum_steps`
    above 1.

    Args:
        learning_rate: float, `LearningRateSchedule` or callable.
        **kwargs: As for `keras.optimizers.Optimizer`: `weight_decay`,
            `clipnorm`, `use_ema` and so on. They act on the update, not on
            the way to the second gradient.

    Example:
        >>> import keras
        >>> from accum_model import AccumModel
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model = AccumModel.wrap(model, micro_batch_size=8)
        >>> model.compile(Heun(0.1), "mse")
    """

    def __init__(self, learning_rate: Any = 0.01, **kwargs: Any) -> None:
        kwargs.setdefault("name", "heun")
        super().__init__(learning_rate=learning_rate, **kwargs)

    def second_point(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
    ) -> list[tf.Tensor]:
        """Where a step of gradient descent would end."""
        rate = tf.convert_to_tensor(self.learning_rate)
        return [
            euler_step(each, tf.cast(rate, each.dtype)) for each in gradients
        ]

    def combine(
        self, first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The mean of both."""
        return [0.5 * (a + b) for a, b in zip(first, second, strict=True)]

    def update_step(
        self,
        gradient: tf.Tensor,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        """Takes the step."""
        gradient = tf.cast(gradient, variable.dtype)
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_add(variable, euler_step(gradient, rate))


def euler_step(gradient: tf.Tensor, learning_rate: tf.Tensor) -> tf.Tensor:
    """The pure rule: downhill, in proportion to the slope."""
    return -learning_rate * gradient
