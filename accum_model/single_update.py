"""An update from one micro-batch of each of several replicas.

Nothing is collected, and there are no buffers. Keras would clip the gradients
of each replica and take the mean of the replicas' means; here the mean is over
rows, and clipping comes after it.
"""

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model import inner_update
from accum_model.accumulator import Gradient
from accum_model.ledger import global_norm
from accum_model.micro_batch import MicroBatch
from accum_model.replicas import Replicas


def apply(
    optimizer: keras.optimizers.Optimizer,
    replicas: Replicas,
    gradients: Sequence[Gradient],
    variables: Sequence[keras.Variable],
    weight: tf.Tensor,
    is_sum: bool,
    batch: MicroBatch | None,
) -> None:
    """Updates with the mean of the replicas' gradients.

    On each replica, with what is its own.

    Args:
        optimizer: The optimizer whose inner one updates.
        replicas: The replicas.
        gradients: Gradients of the replica, one per variable or None.
        variables: The variables.
        weight: The denominator of the replica's mean loss, float64 scalar.
        is_sum: True when the loss is not divided.
        batch: The micro-batch of the replica, or None where it is not known.
    """
    inner_update.warn_of_missing(gradients, variables)
    optimizer.moments.absorb()
    present = [j for j, each in enumerate(gradients) if each is not None]
    if optimizer.counts_rows and batch is not None:
        optimizer.count_rows().note_micro_batch(
            gradients,
            weight,
            batch.num_rows,
            inner_update.loss_scale(optimizer),
            is_sum,
            batch.noise_sums,
        )
    factor = weight if is_sum else weight * replicas.count
    replicas.together(
        functools.partial(
            _apply_all,
            optimizer,
            replicas,
            [variables[j] for j in present],
            is_sum,
        ),
        [_weighted(gradients[j], factor) for j in present],
        weight,
        None if batch is None else batch.num_rows,
    )


def _apply_all(
    optimizer, replicas, variables, is_sum, numerators, weight, num_rows
):
    counts = {"weight": weight}
    ledger = optimizer.count_rows() if optimizer.counts_rows else None
    if ledger is not None and num_rows is not None:
        counts["num_rows"] = num_rows
        if ledger.noise is not None:
            counts["noise"] = ledger.noise.pending.value
    total = replicas.totals(counts)
    divisor = tf.ones_like(total["weight"]) if is_sum else total["weight"]

    def mean(numerators):
        means = [_divided(each, divisor) for each in numerators]
        norm = None
        if ledger is not None:
            scale = inner_update.loss_scale(optimizer)
            norm = global_norm(means, 1 if scale is None else scale)
        return means, norm

    def finish():
        means, norm = replicas.on_each(mean, replicas.total(numerators))
        if ledger is not None:
            ledger.note_norm(replicas.first(norm))
        if "num_rows" in total:
            ledger.settle(total["num_rows"])
        if "noise" in total:
            ledger.settle_noise(total["noise"], is_sum=is_sum)
        inner_update.apply(optimizer, replicas, means, variables)
        optimizer.moments.settle()

    tf.cond(total["weight"] > 0, finish, optimizer.moments.discard)
    if ledger is not None:
        replicas.on_each(ledger.forget)


def _weighted(gradient, factor):
    if isinstance(gradient, tf.IndexedSlices):
        values = _weighted(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    # A replica without rows has no weight, and may have NaN.
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def _divided(numerator, divisor):
    if isinstance(numerator, tf.IndexedSlices):
        values = _divided(numerator.values, divisor)
        return tf.IndexedSlices(
            values, numerator.indices, numerator.dense_shape
        )
    return numerator / tf.cast(divisor, numerator.dtype)
