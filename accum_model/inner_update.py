"""The inner optimizer of an accumulating one: its loss scale, its updates.

Also what is said about variables that have no gradient.
"""

import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import optimizer_chain
from accum_model.accumulator import Gradient
from accum_model.replicas import Replicas
from accum_model.replicas import Value


def apply(
    optimizer: keras.optimizers.Optimizer,
    replicas: Replicas,
    gradients: Sequence[Value],
    variables: Sequence[keras.Variable],
) -> None:
    """Has the inner optimizer apply gradients that are those of all replicas.

    In cross-replica context.
    """
    inner = optimizer.inner_optimizer
    if not replicas.are_several:
        inner.apply(gradients, variables)
        return
    mover = optimizer_chain.innermost(inner)
    with _keras_compat.without_reduction(mover):
        replicas.on_each(lambda own: inner.apply(own, variables), gradients)


def loss_scaling(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.LossScaleOptimizer | None:
    """The optimizer inside `optimizer` that scales the loss, or None."""
    return optimizer_chain.find(optimizer, keras.optimizers.LossScaleOptimizer)


def loss_scale(
    optimizer: keras.optimizers.Optimizer,
) -> tf.Tensor | float | None:
    """What the inner optimizer of `optimizer` multiplies the loss by, if so."""
    scaling = loss_scaling(optimizer)
    if scaling is not None:
        return scaling.dynamic_scale.value
    return optimizer.inner_optimizer.loss_scale_factor


def warn_of_missing(
    grads: Sequence[Gradient], variables: Sequence[keras.Variable]
) -> None:
    """Says about missing gradients what Keras says.

    Raises:
        ValueError: If every gradient is missing.
    """
    missing = [
        getattr(variable, "path", variable.name)
        for gradient, variable in zip(grads, variables, strict=True)
        if gradient is None
    ]
    if len(missing) == len(variables):
        raise ValueError(
            "No gradients provided for any variable. Received: a gradient of "
            f"None for each of {missing}. Check that the loss depends on them."
        )
    if missing:
        warnings.warn(
            f"Gradients do not exist for variables {missing} when minimizing "
            "the loss. If using `model.compile()`, did you forget to provide a "
            "`loss` argument?",
            stacklevel=3,
        )
