"""SAM: the gradient where the loss nearby is worst.

.. math:: \\epsilon = \\rho \\, g(w) / \\lVert g(w) \\rVert_2, \\qquad
    w \\leftarrow \\text{inner}(w, g(w + \\epsilon))

with the norm over all variables together. Foret et al., "Sharpness-Aware
Minimization for Efficiently Improving Generalization", arXiv:2010.01412,
algorithm 1 with p = 2.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import checks
from accum_model.optimizers.wrapper import Wrapper
from accum_model.two_point import TwoPointOptimizer


@keras.saving.register_keras_serializable(package="accum_model")
class SAM(TwoPointOptimizer, Wrapper):
    """Sharpness-aware minimisation with any optimizer.

    Both gradients are taken on the same rows, with the same random numbers.
    Works in an `AccumModel`, or with an `AccumCallback`, where Keras's own
    `train_step` is used; with `micro_batch_size`, but not with `accum_steps`
    above 1.

    Args:
        inner_optimizer: Optimizer that makes the updates: a Keras optimizer, or
            the name or config of one.
        rho: Number > 0. How far from the weights the second gradient is taken,
            as a Euclidean distance. Defaults to 0.05.
        name: Name of the optimizer, or None for a generated one.
        **kwargs: Arguments of `keras.optimizers.Optimizer` that are to be set
            on the inner optimizer, such as `weight_decay` and `clipnorm`.

    Attributes:
        inner_optimizer: The optimizer that makes the updates.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer.
        ValueError: If `rho` is not a number > 0.

    Example:
        >>> import keras
        >>> from accum_model import AccumModel
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model = AccumModel.wrap(model, micro_batch_size=8)
        >>> model.compile(SAM(keras.optimizers.SGD(0.1)), "mse")

    References:
        Foret et al., `Sharpness-Aware Minimization for Efficiently Improving
        Generalization <https://arxiv.org/abs/2010.01412>`_, 2021, algorithm 1.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        rho: float = 0.05,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        rho = checks.positive_number("rho", rho)
        super().__init__(inner_optimizer, name, **kwargs)
        self.rho = rho

    def second_point(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
    ) -> list[tf.Tensor]:
        """Uphill, at the distance `rho`."""
        return ascent(gradients, self.rho)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, the inner optimizer as its config."""
        return {**super().get_config(), "rho": self.rho}


def ascent(gradients: Sequence[tf.Tensor], rho: float) -> list[tf.Tensor]:
    """The pure rule: steps of length `rho` along the gradient, all together.

    No step where the gradient is zero.
    """
    squares = [
        tf.reduce_sum(tf.square(tf.cast(each, "float64"))) for each in gradients
    ]
    factor = tf.math.divide_no_nan(
        tf.constant(rho, "float64"), tf.sqrt(tf.add_n(squares))
    )
    return [each * tf.cast(factor, each.dtype) for each in gradients]
