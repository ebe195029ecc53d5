"""From micro-batches to updates: the mean of a cycle, applied at its end.

Also what is said about variables that have no gradient.
"""

import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model import checks
from accum_model import nonfinite
from accum_model import optimizer_chain
from accum_model.accumulator import Accumulator
from accum_model.accumulator import Gradient
from accum_model.buffers import Buffers
from accum_model.ledger import RowLedger
from accum_model.nonfinite import Guard


class Updater:
    """Takes micro-batches, and updates when one ends its cycle.

    Args:
        optimizer: The accumulating optimizer; its `inner_optimizer`,
            `gradient_transform` and `penalty` are looked up when needed.
        buffers: Its buffers.
        guard: What keeps gradients that are not finite out, or None.

    Attributes:
        guard: As given.
        ledger: Counts rows for the logs, or None.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        buffers: Buffers,
        guard: Guard | None,
    ) -> None:
        self._optimizer = optimizer
        self._buffers = buffers
        self.guard = guard
        self.ledger: RowLedger | None = None

    def take(
        self,
        cycle: Accumulator,
        grads: Sequence[Gradient],
        weight: tf.Tensor,
        num_rows: tf.Tensor | None,
        num_skipped: tf.Tensor | int = 0,
        noise_sums: tf.Tensor | None = None,
    ) -> None:
        """Adds a micro-batch to its cycle; updates if that ends with it.

        Args:
            cycle: The cycle of the variables.
            grads: Gradients of the micro-batch, one per variable or None.
            weight: Its weight, scalar.
            num_rows: Its rows, scalar, or None where nobody knows.
            num_skipped: How many parts of it were left out because their
                gradients were not finite.
            noise_sums: Of its parts, see `RowLedger.note_micro_batch`.
        """
        guard, scaling, is_finite = self.guard, self._scaling, True
        # A loss scale may change within a cycle: sums are kept without it.
        scale = loss_scale(self._optimizer)
        if guard is not None:
            grads, weight, is_finite = guard.select(
                cycle, grads, weight, num_skipped
            )
            if num_rows is not None:
                num_rows = tf.where(is_finite, num_rows, 0)
            if scaling is not None and guard.policy == "skip_micro_batch":
                has_bad = tf.logical_or(
                    tf.logical_not(is_finite), num_skipped > 0
                )
                nonfinite.lower_loss_scale(scaling, has_bad)
        self._moments.absorb(is_finite)
        if self.ledger is not None and num_rows is not None:
            self.ledger.note_micro_batch(
                grads, weight, num_rows, scale, cycle.is_sum, noise_sums
            )
        factor = weight
        if scale is not None:
            factor = weight / tf.cast(scale, weight.dtype)
        is_last = cycle.ends_cycle()
        if guard is None:
            # A cycle without weight has nothing to apply and starts over.
            has_weight = cycle.weight_sum.value + weight > 0
            is_last = tf.logical_and(is_last, has_weight)

        def collect():
            cycle.accumulate(grads, weight, factor)
            if guard is None:
                self._moments.keep_if(cycle.position.value > 0)
            if self.ledger is not None and num_rows is not None:
                self.ledger.add(num_rows)

        tf.cond(
            is_last,
            lambda: self._finish(cycle, grads, weight, factor, num_rows),
            collect,
        )

    def flush(self, cycle: Accumulator) -> None:
        """Updates with what a partial cycle has collected, if anything."""
        if tf.executing_eagerly() and int(cycle.position.value) == 0:
            return
        nothing = [None] * len(cycle.variables)
        zero = tf.zeros((), cycle.weight_dtype)
        self._finish(cycle, nothing, zero, zero, 0, is_flush=True)

    def reset(self) -> None:
        """Discards what has been collected."""
        self._buffers.reset()
        self._moments.discard()

    def _finish(self, cycle, grads, weight, factor, num_rows, is_flush=False):
        """Updates with a cycle and a last micro-batch, and empties it."""
        guard, scaling = self.guard, self._scaling
        total_weight = cycle.weight_sum.value + weight

        def apply():
            self._apply_mean(cycle, grads, weight, factor)
            self._moments.settle()
            if self.ledger is not None and num_rows is not None:
                calls = cycle.position.value + (0 if is_flush else 1)
                self.ledger.settle(num_rows, calls, cycle.is_sum)

        def discard():
            if guard is not None:
                if scaling is not None and guard.policy != "skip_micro_batch":
                    nonfinite.lower_loss_scale(scaling, cycle.is_spoiled.value)
                guard.count_discarded(cycle)
            self._moments.discard()
            if self.ledger is not None:
                self.ledger.discard()

        if guard is not None:
            tf.cond(guard.must_discard(cycle, total_weight), discard, apply)
        elif is_flush:  # Of a cycle that may be without weight.
            tf.cond(total_weight > 0, apply, discard)
        else:
            apply()
        cycle.reset(self._buffers.accum_steps.value)

    def _apply_mean(self, cycle, grads, weight, factor):
        """Hands the mean of a cycle to the inner optimizer.

        A variable that no micro-batch of the cycle had a gradient for is left
        out, so that its slots stand still as they would for a large batch.
        """
        everything = range(len(cycle.variables))
        present = [j for j in everything if grads[j] is not None]
        absent = [j for j in everything if grads[j] is None]

        def apply_to(indices):
            if indices:
                variables = [cycle.variables[j] for j in indices]
                means = cycle.average(indices, grads, weight, factor)
                if cycle.is_sum:
                    total_weight = cycle.weight_sum.value + weight
                    self._count_penalty_once(means, variables, total_weight)
                self._optimizer.inner_optimizer.apply(
                    self._prepare(means, variables), variables
                )

        if not absent:
            apply_to(present)
        elif tf.executing_eagerly():
            collected = cycle.has_gradient(absent).numpy()
            late = [j for j, has in zip(absent, collected, strict=True) if has]
            apply_to(sorted(present + late))
        else:
            # A graph cannot choose among all subsets. Those absent now were
            # all collected earlier in the cycle, or (the usual case: they
            # never have a gradient) none was.
            tf.cond(
                tf.reduce_any(cycle.has_gradient(absent)),
                lambda: apply_to(list(everything)),
                lambda: apply_to(present),
            )

    def _count_penalty_once(self, sums, variables, num_micro_batches):
        """Takes the penalties on weights out of a sum, all but one.

        Each micro-batch of a cycle has added them to its loss. In a mean they
        are averaged and need nothing done.
        """
        with tf.GradientTape() as tape:
            penalty = self._optimizer.penalty()
        if penalty is None:
            return
        surplus = num_micro_batches - 1
        for index, each in enumerate(tape.gradient(penalty, variables)):
            if each is not None:
                each = tf.cast(each, sums[index].dtype)
                sums[index] -= each * tf.cast(surplus, each.dtype)

    def _prepare(self, means, variables):
        """From mean gradients to those that the inner optimizer is given."""
        if self.ledger is not None:
            self.ledger.note_norm(means)
        transform = self._optimizer.gradient_transform
        if transform is not None:
            means = checks.transformed(
                transform(list(means), variables), means, transform
            )
        scale = loss_scale(self._optimizer)
        if scale is not None:
            means = [mean * tf.cast(scale, mean.dtype) for mean in means]
        return means

    @property
    def _moments(self):
        return self._optimizer.moments

    @property
    def _scaling(self):
        return loss_scaling(self._optimizer)


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
