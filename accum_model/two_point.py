"""Optimizers that take the gradient at two points for each update.

With gradient :math:`g_1` at the weights :math:`w` such an optimizer names a
displacement :math:`d`, is given :math:`g_2` at :math:`w + d` for the same rows
and the same random numbers, and updates :math:`w` with what it makes of both.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model import optimizer_chain

_is_served: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_served", default=False
)


class TwoPointOptimizer(keras.optimizers.Optimizer):
    """Base class of optimizers with two gradients per update.

    A subclass says where the second gradient is taken (`second_point`), what
    the two make together (`combine`), and has an `update_step` as every Keras
    optimizer, which is given that. `AccumModel`, and a model that is fitted
    with an `AccumCallback`, do the rest; in any other model it refuses to
    work, because nobody there would take the second gradient.

    Both gradients are those of the whole batch, also where `micro_batch_size`
    cuts it. Moving statistics, seeds and metrics are those of the first.

    Example:
        >>> import keras
        >>> class Lookback(TwoPointOptimizer):
        ...     def second_point(self, gradients, variables):
        ...         return [0.01 * gradient for gradient in gradients]
        ...     def combine(self, first, second):
        ...         return [2 * a - b for a, b in zip(first, second)]
        ...     def update_step(self, gradient, variable, learning_rate):
        ...         self.assign_sub(variable, gradient * learning_rate)
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(Lookback(0.1), "mse")  # fit it with AccumCallback()
    """

    def second_point(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
    ) -> Sequence[tf.Tensor]:
        """Where the second gradient is taken, seen from the weights.

        Args:
            gradients: The gradient at the weights, one dense tensor per
                variable, without any loss scale. Zeros where there is none.
            variables: The trainable variables.

        Returns:
            Displacements, one of each variable's shape.
        """
        raise NotImplementedError

    def combine(
        self, first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        """What the update is given: by default the second gradient.

        Args:
            first: The gradient at the weights.
            second: The gradient at the second point.

        Returns:
            One tensor per variable. A loss scale is in all of them alike, so
            the result must be linear in the two.
        """
        return second

    def apply(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """As in Keras, with what `combine` returned.

        Raises:
            RuntimeError: If the gradient was taken at one point only.
        """
        if not _is_served.get():
            raise RuntimeError(
                f"{type(self).__name__} needs the gradient at two points per "
                "update, because one is not enough to tell its step. Received: "
                "a gradient from a training step that takes it once. Compile "
                "it into an AccumModel, or fit with AccumCallback(); with "
                "Keras's own train_step, and accum_steps=1."
            )
        super().apply(grads, trainable_variables)


def find(
    optimizer: keras.optimizers.Optimizer | None,
) -> TwoPointOptimizer | None:
    """The two-point optimizer at any depth, or None."""
    return optimizer_chain.find(optimizer, TwoPointOptimizer)


@contextlib.contextmanager
def served() -> Iterator[None]:
    """A block in which gradients of two points are applied."""
    token = _is_served.set(True)
    try:
        yield
    finally:
        _is_served.reset(token)
