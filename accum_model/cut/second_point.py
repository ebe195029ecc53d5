"""The gradient at a second point, for optimizers that ask for one.

On the same rows, from the same states, hence with the same random numbers. What
the second evaluation would assign is dropped.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from accum_model import inner_update
from accum_model import noise_scale
from accum_model.cut import cut_checks
from accum_model.cut.evaluation import Evaluation
from accum_model.cut.evaluation import Task
from accum_model.two_point import TwoPointOptimizer


def evaluate(
    task: Task,
    evaluate_once: Callable[[Task], Evaluation],
    optimizer: TwoPointOptimizer,
    first: Evaluation,
) -> Evaluation:
    """Returns `first` with the gradient that the two points make together.

    Args:
        task: The step.
        evaluate_once: Evaluates it at one point.
        optimizer: Names the second point.
        first: The evaluation at the weights.
    """
    variables = task.model.trainable_variables
    scale = inner_update.loss_scale(task.optimizer)
    gradients = _dense(first.gradients, variables)
    if task.batch.noise_sums is not None:
        task.batch.noise_sums = noise_scale.with_update(
            task.batch.noise_sums, noise_scale.square_norm(gradients)
        )
    unscaled = gradients
    if scale is not None:
        unscaled = [each / tf.cast(scale, each.dtype) for each in gradients]
    unscaled = task.optimizer.replicas.of_large_batch(
        unscaled, task.batch.weight
    )
    displacement = cut_checks.one_per_variable(
        "second_point",
        optimizer,
        optimizer.second_point(unscaled, variables),
        variables,
    )
    there = task.at(displacement)
    second = task.plan.settle(lambda: evaluate_once(there))
    combined = cut_checks.one_per_variable(
        "combine",
        optimizer,
        optimizer.combine(gradients, _dense(second.gradients, variables)),
        variables,
    )
    absent = [
        one is None and other is None
        for one, other in zip(first.gradients, second.gradients, strict=True)
    ]
    return dataclasses.replace(
        first,
        gradients=[
            None if is_absent else each
            for is_absent, each in zip(absent, combined, strict=True)
        ],
    )


def _dense(gradients, variables):
    return [
        tf.zeros(variable.shape, variable.dtype)
        if gradient is None
        else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
