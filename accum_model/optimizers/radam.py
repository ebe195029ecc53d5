"""RAdam: Adam that waits until its second moment can be trusted.

At update :math:`t`, with
:math:`\\rho_\\infty = 2 / (1 - \\beta_2) - 1` and
:math:`\\rho_t = \\rho_\\infty - 2 t \\beta_2^t / (1 - \\beta_2^t)`,

.. math:: w \\leftarrow w - \\alpha_t
    \\begin{cases}
    r_t \\hat m_t / (\\sqrt{\\hat v_t} + \\epsilon)
        & \\rho_t \\ge \\text{threshold} \\\\
    \\hat m_t & \\text{otherwise,}
    \\end{cases}
    \\qquad r_t^2 =
    \\frac{(\\rho_t - 4)(\\rho_t - 2) \\rho_\\infty}
    {(\\rho_\\infty - 4)(\\rho_\\infty - 2) \\rho_t}.

Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond",
arXiv:1908.03265, algorithm 2.
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from accum_model.optimizers import argument_checks
from accum_model.optimizers import update_rate


@keras.saving.register_keras_serializable(package="accum_model")
class RAdam(update_rate.UpdateRate):
    """Rectified Adam, with an optional warm-up and decay of the rate.

    In the first updates the second moment is the mean of a few squares, and
    Adam's step is at its wildest. RAdam takes steps of momentum then, and
    after that Adam's, shortened by how much the second moment still varies.

    With `total_steps` above 0 the rate grows linearly from 0 to
    `learning_rate` over the first ``total_steps * warmup_proportion`` updates,
    falls linearly to `min_learning_rate` at update `total_steps`, and stays
    there. Weight decay is in proportion to the rate in use.

    Sparse gradients are taken as the dense ones they stand for: every row
    moves with its momentum at every update.

    Args:
        learning_rate: float, `LearningRateSchedule` or callable. Defaults to
            0.001.
        beta_1: Number in [0, 1), decay rate of the mean of gradients. Defaults
            to 0.9.
        beta_2: Number in [0, 1), decay rate of the mean of their squares.
            Defaults to 0.999.
        epsilon: Number >= 0, added to the root of the second moment, after its
            bias is corrected. Defaults to 1e-7.
        amsgrad: bool. True to divide by the largest second moment so far; not
            in the paper. Defaults to False.
        sma_threshold: Number >= 4. Least length of the moving average, in
            updates, that is rectified. The text of the paper says "above 4",
            its authors' code 5. Defaults to 5.0.
        total_steps: int >= 0, updates of the whole training, or 0 for a rate
            that is left as it is. Defaults to 0.
        warmup_proportion: Number in [0, 1], share of `total_steps` in which
            the rate grows. Defaults to 0.1.
        min_learning_rate: Number >= 0, rate at the end. Defaults to 0.0.
        degenerate_to_sgd: bool. True for steps of momentum before the
            rectification starts, as in the paper; they are as steep as the
            loss. False for no step, and no weight decay, until then. Defaults
            to True.
        **kwargs: As for `keras.optimizers.Optimizer`: `weight_decay`,
            `clipnorm`, `use_ema` and so on.

    Raises:
        ValueError: If an argument is not in its range.

    Example:
        >>> import keras
        >>> optimizer = RAdam(1e-3, total_steps=10_000, weight_decay=1e-2)
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(optimizer, "mse")

    References:
        Liu et al., `On the Variance of the Adaptive Learning Rate and Beyond
        <https://arxiv.org/abs/1908.03265>`_, 2020, algorithm 2.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        sma_threshold: float = 5.0,
        total_steps: int = 0,
        warmup_proportion: float = 0.1,
        min_learning_rate: float = 0.0,
        degenerate_to_sgd: bool = True,
        **kwargs: Any,
    ) -> None:
        beta_1 = argument_checks.decay_rate("beta_1", beta_1)
        beta_2 = argument_checks.decay_rate("beta_2", beta_2)
        epsilon = argument_checks.at_least("epsilon", epsilon, 0)
        sma_threshold = argument_checks.at_least(
            "sma_threshold", sma_threshold, 4
        )
        total_steps = argument_checks.num_updates("total_steps", total_steps)
        warmup_proportion = argument_checks.proportion(
            "warmup_proportion", warmup_proportion
        )
        min_learning_rate = argument_checks.at_least(
            "min_learning_rate", min_learning_rate, 0
        )
        super().__init__(learning_rate, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.amsgrad = bool(amsgrad)
        self.sma_threshold = sma_threshold
        self.total_steps = total_steps
        self.warmup_proportion = warmup_proportion
        self.min_learning_rate = min_learning_rate
        self.degenerate_to_sgd = bool(degenerate_to_sgd)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes two moments per variable; three with `amsgrad`."""
        if self.built:
            return
        super().build(variables)
        names = ["momentum", "velocity"] + ["velocity_max"] * self.amsgrad
        self._moments = [
            [self.add_variable_from_reference(each, name) for name in names]
            for each in variables
        ]

    def shared_part(self, number: tf.Tensor) -> "Scalars":
        """The bias corrections and the rectification."""
        return scalars(number, self.beta_1, self.beta_2, self.sma_threshold)

    def has_own_rate(self) -> bool:
        """True with a warm-up, or where the first updates make no step."""
        return self.total_steps > 0 or not self.degenerate_to_sgd

    def rate_of_update(
        self, learning_rate: tf.Tensor, number: tf.Tensor
    ) -> tf.Tensor:
        """The warmed rate; 0 where no step is to be made."""
        if self.total_steps > 0:
            learning_rate = warmed(
                learning_rate,
                number,
                self.total_steps,
                self.warmup_proportion,
                self.min_learning_rate,
            )
        if not self.degenerate_to_sgd:
            learning_rate = tf.where(
                self._shared.is_rectified,
                learning_rate,
                tf.zeros_like(learning_rate),
            )
        return learning_rate

    def update_step(
        self,
        gradient: tf.Tensor,
        variable: tf.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        """Moves the moments, then the variable."""
        moments = self._moments[self._get_variable_index(variable)]
        dtype = variable.dtype
        step, values = rule(
            tf.cast(gradient, dtype),
            [tf.convert_to_tensor(moment) for moment in moments],
            self._shared,
            self.beta_1,
            self.beta_2,
            self.epsilon,
        )
        for moment, value in zip(moments, values, strict=True):
            self.assign(moment, value)
        rate = tf.cast(tf.convert_to_tensor(learning_rate), dtype)
        self.assign_sub(variable, rate * step)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "amsgrad": self.amsgrad,
            "sma_threshold": self.sma_threshold,
            "total_steps": self.total_steps,
            "warmup_proportion": self.warmup_proportion,
            "min_learning_rate": self.min_learning_rate,
            "degenerate_to_sgd": self.degenerate_to_sgd,
        }


class Scalars(NamedTuple):
    """What all variables of one update share; float64 and bool scalars."""

    first_correction: tf.Tensor
    second_correction: tf.Tensor
    is_rectified: tf.Tensor
    rectification: tf.Tensor


def scalars(
    number: tf.Tensor, beta_1: float, beta_2: float, sma_threshold: float
) -> Scalars:
    """The part of the rule that depends on the number of the update only.

    In float64: float32 would lose three digits of the length of the average.
    """
    first = 1 - tf.constant(beta_1, number.dtype) ** number
    second = 1 - tf.constant(beta_2, number.dtype) ** number
    longest = 2 / (1 - beta_2) - 1
    if longest <= sma_threshold:  # Approached, but never reached.
        return Scalars(first, second, tf.constant(False), tf.ones_like(first))
    length = longest - 2 * number * (1 - second) / second
    is_rectified = length >= sma_threshold
    ratio = (length - 4) * (length - 2) * longest
    ratio /= (longest - 4) * (longest - 2) * length
    ratio = tf.where(is_rectified, ratio, tf.ones_like(ratio))
    return Scalars(first, second, is_rectified, tf.sqrt(ratio))


def warmed(
    learning_rate: tf.Tensor,
    number: tf.Tensor,
    total_steps: int,
    warmup_proportion: float,
    min_learning_rate: float,
) -> tf.Tensor:
    """The rate of update `number` with a linear warm-up and decay."""
    num_warm = total_steps * warmup_proportion
    num_decaying = max(total_steps - num_warm, 1)
    share = tf.minimum(number - num_warm, num_decaying) / num_decaying
    decayed = learning_rate + (min_learning_rate - learning_rate) * share
    if num_warm == 0:
        return decayed
    growing = learning_rate * (number / num_warm)
    return tf.where(number <= num_warm, growing, decayed)


def rule(
    gradient: tf.Tensor,
    moments: Sequence[tf.Tensor],
    shared: Scalars,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The pure rule, for one variable.

    Args:
        gradient: Gradient, in the dtype of the variable.
        moments: Mean of the gradients, mean of their squares and, for
            `amsgrad`, the largest such mean so far.
        shared: What all variables share.
        beta_1: Decay rate of the first moment.
        beta_2: Decay rate of the second.
        epsilon: Added to the root of the second.

    Returns:
        The step for a rate of 1, and the new moments.
    """
    dtype = gradient.dtype
    weight_1 = tf.constant(1 - beta_1, dtype)
    weight_2 = tf.constant(1 - beta_2, dtype)
    momentum = moments[0] + (gradient - moments[0]) * weight_1
    velocity = moments[1] + (tf.square(gradient) - moments[1]) * weight_2
    new = [momentum, velocity]
    if len(moments) == 3:
        velocity = tf.maximum(moments[2], velocity)
        new.append(velocity)
    unbiased = momentum / tf.cast(shared.first_correction, dtype)
    root = tf.sqrt(velocity / tf.cast(shared.second_correction, dtype))
    factor = tf.cast(shared.rectification, dtype)
    adaptive = factor * unbiased / (root + tf.constant(epsilon, dtype))
    return tf.where(shared.is_rectified, adaptive, unbiased), new
