"""Adaptive gradient clipping, a gradient transform.

For each unit :math:`i` (of a dense layer, filter of a convolution) with weights
:math:`W_i` and gradient :math:`G_i`, if
:math:`\\|G_i\\| / \\|W_i\\|^* > \\lambda`,

.. math:: G_i \\leftarrow \\lambda \\frac{\\|W_i\\|^*}{\\|G_i\\|} G_i,
    \\qquad \\|W_i\\|^* = \\max(\\|W_i\\|, \\epsilon).

Brock et al., "High-Performance Large-Scale Image Recognition Without
Normalization", arXiv:2102.06171, equation 3.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import checks


@keras.saving.register_keras_serializable(package="accum_model")
class AdaptiveGradientClipping:
    """Clips each unit's gradient to a share of the norm of its weights.

    A gradient transform: pass it as `gradient_transform`. It sees the averaged
    gradient of a cycle, once per update, before the clipping of the inner
    optimizer. A unit is a column of a dense kernel, a filter of a convolution
    kernel, and a bias or scale as a whole, as in the authors' code.

    Args:
        clip_factor: float > 0, the paper's lambda. Defaults to 0.01.
        eps: float > 0, least norm that weights are taken to have, so that
            units that start at zero can move. Defaults to 1e-3.

    Raises:
        ValueError: If an argument is not a number > 0.

    Example:
        >>> import keras
        >>> optimizer = AccumOptimizer(
        ...     keras.optimizers.SGD(0.1),
        ...     accum_steps=4,
        ...     gradient_transform=AdaptiveGradientClipping(0.01),
        ... )

    References:
        Brock et al., `High-Performance Large-Scale Image Recognition Without
        Normalization <https://arxiv.org/abs/2102.06171>`_, 2021, equation 3.
    """

    def __init__(self, clip_factor: float = 0.01, eps: float = 1e-3) -> None:
        self.clip_factor = checks.positive_number("clip_factor", clip_factor)
        self.eps = checks.positive_number("eps", eps)

    def __call__(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
    ) -> list[tf.Tensor]:
        """Returns the clipped gradients, one per variable."""
        return [
            unitwise_clip(
                gradient,
                tf.cast(tf.convert_to_tensor(variable), gradient.dtype),
                self.clip_factor,
                self.eps,
            )
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"clip_factor": self.clip_factor, "eps": self.eps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AdaptiveGradientClipping":
        """Makes a transform from what `get_config` returned."""
        return cls(**config)


def unitwise_clip(
    gradient: tf.Tensor,
    weights: tf.Tensor,
    clip_factor: numbers.Real,
    eps: numbers.Real,
) -> tf.Tensor:
    """The pure rule, for one variable."""
    clip_factor = tf.cast(clip_factor, gradient.dtype)
    largest = clip_factor * tf.maximum(
        _unitwise_norm(weights), tf.cast(eps, gradient.dtype)
    )
    norm = _unitwise_norm(gradient)
    # Where the gradient is not too long nothing is touched, not even rounded.
    safe = tf.where(norm > largest, norm, tf.ones_like(norm))
    return tf.where(norm > largest, gradient * (largest / safe), gradient)


def _unitwise_norm(tensor: tf.Tensor) -> tf.Tensor:
    """One norm per unit, as the authors' code takes it.

    A vector is one unit; a matrix, or a stack of them, has its units along the
    axes after the first; a convolution kernel along its last.
    """
    if sum(size != 1 for size in tensor.shape) <= 1:
        axes = None
    elif tensor.shape.rank <= 3:
        axes = 0
    else:
        axes = list(range(tensor.shape.rank - 1))
    return tf.sqrt(tf.reduce_sum(tf.square(tensor), axes, keepdims=True))
