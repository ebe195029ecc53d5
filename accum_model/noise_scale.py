"""The gradient noise scale: how many rows an update can make use of.

With the mean squared norm :math:`s` of the gradients of micro-batches of
:math:`b` rows, and that of their mean :math:`t` over :math:`B` rows,

.. math:: |G|^2 = \\frac{B t - b s}{B - b} \\qquad
          S = \\frac{s - t}{1 / b - 1 / B} \\qquad
          \\mathcal{B} = S / |G|^2

estimate the squared norm of the true gradient, the variance of the gradient of
one row, and their ratio in rows. The first two are without bias and are
averaged over updates; a mean of ratios would be biased. Micro-batches of
:math:`b_i` rows and shares :math:`p_i` of the update have the mean of
:math:`1 / b_i` for :math:`1 / b`, and :math:`\\sum_i p_i^2 / b_i` for
:math:`1 / B`, which is one over the rows where shares go by rows.

Source: McCandlish et al., `An Empirical Model of Large-Batch Training
<https://arxiv.org/abs/1812.06162>`_, 2018, appendix A.1.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from accum_model.replicas import Replicas

# What is added up over the micro-batches of a cycle, in this order: how many
# there are, their squared norms, 1 / rows, weight^2 / rows, weights, and the
# squared norm of the update where it is another gradient that is applied.
NUM_SUMS = 6


def signal_and_noise(
    square: Any, update_square: Any, inverse_rows: Any, inverse_total: Any
) -> tuple[Any, Any]:
    """The squared norm of the true gradient, and the variance of one row.

    Args:
        square: Mean squared norm of the gradients of micro-batches.
        update_square: Squared norm of their weighted mean.
        inverse_rows: Mean of one over the rows of a micro-batch.
        inverse_total: One over the rows of the update.
    """
    difference = inverse_rows - inverse_total
    signal = (inverse_rows * update_square - inverse_total * square) / (
        difference
    )
    return signal, (square - update_square) / difference


def square_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Sum of the squares of all numbers in dense or sparse gradients.

    Args:
        gradients: Items that are None add nothing; repeated ids of sparse ones
            are added up first.

    Returns:
        float64 scalar.
    """
    halves: dict[tf.DType, list[tf.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            half = tf.nn.l2_loss(_values(gradient))
            halves.setdefault(half.dtype, []).append(half)
    # Few operations: small models feel each of them.
    sums = [tf.cast(tf.add_n(each), "float64") for each in halves.values()]
    return 2 * tf.add_n(sums) if sums else tf.zeros((), "float64")


def record(square: Any, num_rows: Any, weight: Any) -> tf.Tensor:
    """What one micro-batch adds to the sums of its cycle.

    Args:
        square: Squared norm of its gradient, float64 scalar.
        num_rows: Its rows, scalar.
        weight: Its weight in the mean, scalar. Without weight, as without
            rows, it adds nothing.

    Returns:
        float64 tensor of shape `(NUM_SUMS,)`.
    """
    weight = tf.cast(weight, "float64")
    inverse = tf.math.reciprocal(tf.cast(num_rows, "float64"))
    sums = tf.stack(
        [1.0, square, inverse, tf.square(weight) * inverse, weight, 0.0]
    )
    return tf.where(weight > 0, sums, tf.zeros((), "float64"))


def multiplied(sums: tf.Tensor, factor: Any) -> tf.Tensor:
    """`sums` with squared norms multiplied by `factor`, scalar."""
    one, factor = tf.ones((), "float64"), tf.cast(factor, "float64")
    return sums * tf.stack([one, factor, one, one, one, factor])


def with_update(sums: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
    """`sums` where the mean gradient is not the one that is applied.

    Args:
        sums: Sums over all micro-batches of a cycle.
        square: Squared norm of their mean, scalar.
    """
    return tf.concat([sums[:-1], [tf.cast(square, "float64")]], 0)


class NoiseScale:
    """Adds up over micro-batches and updates.

    Args:
        replicas: Those whose micro-batches are added up.

    Attributes:
        pending: float64 variable, calls of `add` and sums of the replica in the
            cycle so far.
        totals: float64 variable, over the updates since `restart`: their
            number; noise and signal; their squares, and their products.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        with tf.init_scope():
            with replicas.local_variables():
                self.pending = _variable(1 + NUM_SUMS, "pending_noise_sums")
            with replicas.variables():
                self.totals = _variable(6, "noise_totals")

    def add(self, sums: tf.Tensor) -> None:
        """Adds the sums of the micro-batches in one call of `apply`."""
        call = tf.concat([tf.ones((1,), "float64"), sums], 0)
        self.pending.value.assign_add(call)

    def settle(
        self,
        pending: tf.Tensor,
        square: tf.Tensor,
        num_calls: tf.Tensor | int,
        is_sum: bool,
    ) -> None:
        """Takes an update into the estimate, if it tells anything.

        Args:
            pending: Sum of `pending` over the replicas.
            square: Squared norm of the gradient that was applied, scalar.
            num_calls: Calls of `apply` in its cycle. Where others were added,
                the cycle is not known in full: it comes from a file, or there
                are several at a time.
            is_sum: True when that gradient is a sum, and weights are rows.
        """
        values = tf.unstack(tf.convert_to_tensor(pending))
        calls, count, squares, inverses, total_inverse, weight, own = values
        square = tf.where(own > 0, own, square)
        inverse_rows = inverses / count
        inverse_total = total_inverse / (weight * weight)
        if is_sum:
            square = square / (weight * weight)
        signal, noise = signal_and_noise(
            squares / count, square, inverse_rows, inverse_total
        )
        # Half is that of two equal micro-batches. Near one the update is one
        # micro-batch, by its weight, and a difference tells nothing.
        tells = tf.reduce_all(
            [
                calls == tf.cast(num_calls * self._replicas.count, "float64"),
                # Means of single replicas say nothing of that of all.
                True if not self._replicas.are_several else own == 0,
                count >= 2,
                inverse_total < 0.75 * inverse_rows,
            ]
        )
        one = tf.ones((), "float64")
        products = [one, noise, signal]
        products += [noise * noise, signal * signal, noise * signal]
        added = tf.stack(products)
        self.totals.assign_add(tf.where(tells, added, tf.zeros_like(added)))

    def forget(self) -> None:
        """Starts a new cycle on the replica."""
        self.pending.value.assign(tf.zeros((1 + NUM_SUMS,), "float64"))

    def restart(self) -> None:
        """Forgets the updates, for a new estimate."""
        self.totals.assign(tf.zeros((6,), "float64"))

    def estimate(self) -> "Estimate":
        """The estimate since `restart`."""
        return Estimate(self.totals.numpy())


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate from the updates of some time.

    Attributes:
        totals: As in `NoiseScale`.
    """

    totals: np.ndarray

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.totals + other.totals)

    @property
    def num_updates(self) -> int:
        """Updates that it is made of."""
        return int(self.totals[0])

    @property
    def scale(self) -> float:
        """The noise scale in rows; NaN where noise hides the gradient."""
        _, noise, signal = self.totals[:3]
        return float(noise / signal) if signal > 0 else float("nan")

    @property
    def standard_error(self) -> float:
        """Of `scale`, from how much single updates differ, in rows."""
        count, noise, signal, *_ = self.totals
        if count < 2 or not signal > 0:
            return float("inf")
        ratio = noise / signal
        # Of noise - ratio * signal, whose mean is zero.
        noises, signals, products = self.totals[3:]
        square = noises - 2 * ratio * products + ratio**2 * signals
        variance = max(square, 0.0) / (count - 1)
        return float(np.sqrt(variance / count) / (signal / count))

    @property
    def is_certain(self) -> bool:
        """True when it is known to a half of itself, with 95% confidence."""
        return self.num_updates >= 10 and (
            0 < 2 * self.standard_error <= self.scale / 2
        )


def advice(estimate: Estimate, rows_per_update: float) -> str:
    """One line on what effective batch size a run could use.

    Args:
        estimate: From the run.
        rows_per_update: The effective batch size it had.
    """
    number = estimate.num_updates
    updates = f"{number} update{'s' if number != 1 else ''}"
    if not estimate.is_certain:
        return (
            "Gradient noise scale: too uncertain to say which effective batch "
            f"size this run could use (after {updates}). More updates, or more "
            "micro-batches per update, make it clearer."
        )
    margin = 2 * estimate.standard_error
    low, scale, high = (
        _rounded(estimate.scale + each) for each in (-margin, 0, margin)
    )
    text = (
        f"Gradient noise scale: about {scale} rows ({low} to {high}, from "
        f"{updates} of {rows_per_update:.0f} rows). This run could use an "
        f"effective batch size of up to about {scale} rows; beyond it, more "
        "rows per update help little"
    )
    if rows_per_update > 2 * estimate.scale:
        text += ", and fewer than it had would do nearly as well"
    return text + "."


def _rounded(value: float) -> str:
    """Two digits of it, or all before the point."""
    if value >= 100:
        return str(int(float(f"{value:.2g}")))
    return f"{value:.2g}"


def _values(gradient):
    """Its numbers, such that their squares add up to its squared norm."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = _merged(gradient)
    gradient = tf.convert_to_tensor(gradient)
    if gradient.dtype.size < 4:
        gradient = tf.cast(gradient, "float32")
    return gradient


def _merged(slices):
    """The rows of a sparse gradient, those of the same id added up.

    As many as there were, the others zero: sizes stay known to XLA, and the
    dense gradient, which may be large, is not made.
    """
    order = tf.argsort(slices.indices)
    indices = tf.gather(slices.indices, order)
    is_new = tf.cast(indices[1:] != indices[:-1], "int32")
    places = tf.concat([tf.zeros_like(is_new[:1]), tf.cumsum(is_new)], 0)
    places = places[: tf.shape(indices)[0]]
    return tf.math.unsorted_segment_sum(
        tf.gather(slices.values, order), places, tf.shape(indices)[0]
    )


def _variable(size, name):
    return keras.Variable(
        np.zeros(size), dtype="float64", trainable=False, name=name
    )
