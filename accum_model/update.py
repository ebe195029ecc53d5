"""From micro-batches to updates: the mean of a cycle, applied at its end."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import checks
from accum_model import inner_update
from accum_model import ledger
from accum_model import nonfinite
from accum_model.accumulator import Accumulator
from accum_model.accumulator import Gradient
from accum_model.buffers import Buffers
from accum_model.buffers import concrete
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
        self._replicas = buffers.replicas
        self.guard = guard
        self.ledger: RowLedger | None = None
        self._flushes: dict[tuple[Any, ...], Callable[[], None]] = {}

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
        guard, is_finite = self.guard, True
        # A loss scale may change within a cycle: sums are kept without it.
        scale = inner_update.loss_scale(self._optimizer)
        num_bad = None
        if guard is not None:
            grads, weight, is_finite, num_bad = guard.select(
                cycle, grads, weight, num_skipped
            )
            if num_rows is not None:
                num_rows = tf.where(is_finite, num_rows, 0)
        self._moments.absorb(is_finite)
        if self.ledger is not None and num_rows is not None:
            self.ledger.note_micro_batch(
                grads, weight, num_rows, scale, cycle.is_sum, noise_sums
            )
        factor = weight
        if scale is not None:
            factor = weight / tf.cast(scale, weight.dtype)
        if not cycle.is_sum:
            # Keras has divided a mean, but no sum, by the replicas.
            factor *= self._replicas.count
        self._replicas.together(
            functools.partial(self._take_all, cycle),
            grads,
            weight,
            factor,
            num_rows,
            num_bad,
        )

    def flush(self, cycle: Accumulator) -> None:
        """Updates with what a partial cycle has collected, if anything."""
        if tf.executing_eagerly() and concrete(cycle.position) == 0:
            return
        if self._replicas.are_several:
            self._compiled_flush(cycle)()
        else:
            self._flush(cycle)

    def _flush(self, cycle):
        everything = list(range(len(cycle.variables)))
        self._replicas.together(
            functools.partial(self._finish, cycle, everything, has_rows=True)
        )

    def _compiled_flush(self, cycle):
        """As a graph, because replicas are slow without; traced once."""
        noise = None if self.ledger is None else self.ledger.noise
        parts = (cycle, self.ledger, noise, self._optimizer.inner_optimizer)
        key = (cycle.is_sum, *map(id, parts))
        if key not in self._flushes:
            self._flushes[key] = tf.function(
                functools.partial(self._flush, cycle), autograph=False
            )
        return self._flushes[key]

    def reset(self) -> None:
        """Discards what has been collected."""
        if self.guard is not None:
            for cycle in self._buffers.all_cycles():
                self.guard.count(cycle.num_spoiled)
        self._buffers.reset()
        self._moments.discard()

    def _take_all(self, cycle, grads, weight, factor, num_rows, num_bad):
        """Takes the micro-batches of all replicas."""
        replicas, guard, scaling = self._replicas, self.guard, self._scaling
        skips = guard is not None and guard.policy == "skip_micro_batch"
        if skips and scaling is not None:
            (has_bad,) = replicas.total([num_bad])
            nonfinite.lower_loss_scale(scaling, replicas.first(has_bad) > 0)

        def add(grads, weight, factor, num_rows):
            cycle.accumulate(grads, weight, factor)
            if self.ledger is not None and num_rows is not None:
                self.ledger.add(num_rows)

        # Always, not only where the cycle goes on: gradients are then freed
        # one by one, and the condition below encloses none of them.
        replicas.on_each(add, grads, weight, factor, num_rows)
        cycle.count()
        is_last = cycle.is_over()
        if self._knows_weight:
            # A cycle without weight has nothing to apply and starts over.
            is_last = tf.logical_and(is_last, cycle.weight_sum.value > 0)

        def go_on():
            if self._knows_weight:
                cycle.start_over()
                self._moments.keep_if(cycle.position.value > 0)

        absent = [j for j, gradient in enumerate(grads) if gradient is None]
        tf.cond(
            is_last,
            lambda: self._finish(
                cycle, absent, num_rows is not None, self._knows_weight
            ),
            go_on,
        )

    @property
    def _knows_weight(self):
        """True where no exchange is needed, and no second condition."""
        return self.guard is None and not self._replicas.are_several

    def _finish(self, cycle, absent, has_rows, has_weight=False):
        """Updates with a cycle, and empties it.

        Args:
            cycle: The cycle.
            absent: Places of variables that may have no gradient in it.
            has_rows: True when its rows were counted.
            has_weight: True when nothing can keep it from being applied.
        """
        replicas, guard, scaling = self._replicas, self.guard, self._scaling
        ledger = self.ledger

        def count():
            counts = {"weight": cycle.weight_sum.value}
            if guard is not None:
                counts["num_bad"] = cycle.num_spoiled.value
            if ledger is not None and has_rows:
                counts["num_rows"] = ledger.num_pending.value
                if ledger.noise is not None:
                    counts["noise"] = ledger.noise.pending.value
            if absent:
                counts["num_with"] = cycle.has_gradient(absent)
            return counts

        total = replicas.totals(replicas.on_each(count))

        def apply():
            self._apply_mean(cycle, absent, total)
            self._moments.settle()
            if "num_rows" in total:
                ledger.settle(total["num_rows"])
            if "noise" in total:
                num_calls = cycle.position.value
                ledger.settle_noise(total["noise"], num_calls, cycle.is_sum)

        def discard():
            self._moments.discard()
            if guard is None:
                return
            if scaling is not None and guard.policy != "skip_micro_batch":
                nonfinite.lower_loss_scale(scaling, total["num_bad"] > 0)
            guard.count_discarded(total["num_bad"])

        def empty():
            cycle.empty()
            if ledger is not None:
                ledger.forget()

        if has_weight:
            apply()
        else:
            must_discard = tf.logical_not(total["weight"] > 0)
            if guard is not None:
                must_discard |= guard.must_discard(total["num_bad"])
            tf.cond(must_discard, discard, apply)
        if guard is not None:
            guard.count(total["num_bad"])
        replicas.on_each(empty)
        cycle.start(self._buffers.accum_steps.value)

    def _apply_mean(self, cycle, absent, total):
        """Hands the mean of a cycle to the inner optimizer.

        A variable that no micro-batch of the cycle had a gradient for is left
        out, so that its slots stand still as they would for a large batch.
        """
        everything = range(len(cycle.variables))
        present = [j for j in everything if j not in absent]

        def apply_to(indices):
            if not indices:
                return
            replicas = self._replicas
            means, norm = replicas.on_each(
                functools.partial(self._prepare, cycle, indices),
                replicas.total(
                    replicas.on_each(functools.partial(cycle.read, indices))
                ),
                total["weight"],
            )
            if self.ledger is not None:
                self.ledger.note_norm(replicas.first(norm))
            variables = [cycle.variables[j] for j in indices]
            inner_update.apply(self._optimizer, replicas, means, variables)

        if not absent:
            apply_to(present)
        elif tf.executing_eagerly():
            has = total["num_with"].numpy() > 0
            late = [j for j, has in zip(absent, has, strict=True) if has]
            apply_to(sorted(present + late))
        else:
            # A graph cannot choose among all subsets. Those absent now were
            # all collected earlier in the cycle, or (the usual case: they
            # never have a gradient) none was.
            tf.cond(
                tf.reduce_any(total["num_with"] > 0),
                lambda: apply_to(list(everything)),
                lambda: apply_to(present),
            )

    def _prepare(self, cycle, indices, numerators, total_weight):
        """From numerators to what the inner optimizer is given.

        Returns:
            The gradients, and the global norm of their mean where it is noted.
        """
        variables = [cycle.variables[j] for j in indices]
        means = cycle.means(indices, numerators, total_weight)
        if cycle.is_sum:
            self._count_penalty_once(
                means, variables, total_weight / self._replicas.count
            )
        norm = None if self.ledger is None else ledger.global_norm(means)
        transform = self._optimizer.gradient_transform
        if transform is not None:
            means = checks.transformed(
                transform(list(means), variables), means, transform
            )
        scale = inner_update.loss_scale(self._optimizer)
        if scale is not None:
            means = [mean * tf.cast(scale, mean.dtype) for mean in means]
        return means, norm

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

    @property
    def _moments(self):
        return self._optimizer.moments

    @property
    def _scaling(self):
        return inner_update.loss_scaling(self._optimizer)
