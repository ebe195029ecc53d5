"""One update: the mean of a cycle, handed to the inner optimizer.

Also what is said about variables that have no gradient.
"""

import warnings
from collections.abc import Callable
from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model.accumulator import Accumulator
from accum_model.accumulator import Gradient


def apply_mean(
    inner_optimizer: keras.optimizers.Optimizer,
    cycle: Accumulator,
    grads: Sequence[Gradient],
    weight: tf.Tensor,
    factor: tf.Tensor,
    finish: Callable[..., list[tf.Tensor]],
) -> None:
    """Updates with the mean of a cycle and its last micro-batch.

    A variable that no micro-batch of the cycle had a gradient for is left out,
    so that its slots stand still as they would for a large batch.

    Args:
        inner_optimizer: The optimizer that updates; built.
        cycle: What was collected before.
        grads: Gradients of the last micro-batch, one per variable; all None
            to update with what was collected.
        weight: Weight of the last micro-batch, scalar.
        factor: What its gradients are multiplied by, scalar.
        finish: Called with the mean gradients and their variables; what it
            returns is applied.
    """
    everything = range(len(cycle.variables))
    present = [j for j in everything if grads[j] is not None]
    absent = [j for j in everything if grads[j] is None]

    def apply_to(indices):
        if indices:
            variables = [cycle.variables[j] for j in indices]
            means = cycle.average(indices, grads, weight, factor)
            inner_optimizer.apply(finish(means, variables), variables)

    if not absent:
        apply_to(present)
    elif tf.executing_eagerly():
        collected = cycle.has_gradient(absent).numpy()
        late = [j for j, has in zip(absent, collected, strict=True) if has]
        apply_to(sorted(present + late))
    else:
        # A graph cannot choose among all subsets. Those absent now were all
        # collected earlier in the cycle, or (the usual case: they never have a
        # gradient) none was.
        tf.cond(
            tf.reduce_any(cycle.has_gradient(absent)),
            lambda: apply_to(list(everything)),
            lambda: apply_to(present),
        )


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
