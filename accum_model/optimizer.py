"""The optimizer wrapper: one update of the inner optimizer per cycle.

`apply` adds the gradients of a micro-batch to buffers; the micro-batch that
ends the cycle applies the weighted mean

.. math:: \\bar g = \\sum_i w_i g_i \\, / \\, \\sum_i w_i

with the inner optimizer. Between updates nothing but the buffers changes.
"""

import contextlib
import warnings
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import call_checks
from accum_model import checks
from accum_model import inner_update
from accum_model import ledger
from accum_model import micro_batch
from accum_model import optimizer_checks
from accum_model import optimizer_state
from accum_model import single_update
from accum_model.accumulator import Gradient
from accum_model.micro_batch import MicroBatch


@keras.saving.register_keras_serializable(package="accum_model")
class AccumOptimizer(optimizer_state.OptimizerState):
    """Makes any Keras optimizer update once per `accum_steps` calls.

    Use it in a `train_step` of your own, one for each optimizer of a GAN, or
    in a hand-written loop. `AccumModel` and `AccumCallback` use it for `fit`,
    where they also pass the rows of each micro-batch as its weight; on its own
    in `keras.Model.compile` it counts every micro-batch alike.

    Clipping, weight decay, moving averages, constraints and learning-rate
    schedules are those of the inner optimizer and happen once per update.
    With `accum_steps=1`, and no `nonfinite` or `gradient_transform`, every call
    goes straight to the inner optimizer and no buffer exists.

    Args:
        inner_optimizer: Optimizer that makes the updates: a Keras optimizer, or
            the name or config of one. A `keras.optimizers.LossScaleOptimizer`
            belongs inside.
        accum_steps: int >= 1. Micro-batches per update. Defaults to 1.
        nonfinite: What to do with a micro-batch whose gradient is not finite:
            `"skip_micro_batch"` leaves it out, numerator and denominator;
            `"skip_update"` discards its cycle, at the usual end; `"raise"` is
            an error that names it (inside XLA, which cannot raise, the cycle
            is discarded). None does not look, except around a
            `LossScaleOptimizer`, where it means `"skip_update"`. Defaults to
            None.
        accum_dtype: Float dtype of the buffers, or None for float32 (float64
            for float64 variables). Defaults to None.
        gradient_transform: Callable `(gradients, variables) -> gradients`,
            called once per update on the averaged gradients, before the inner
            optimizer's clipping; `AdaptiveGradientClipping` is one. To be
            saved it must be registered with Keras. Defaults to None.
        name: Name of the optimizer, or None for a generated one.

    Attributes:
        inner_optimizer: The optimizer that makes the updates.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer, or
            `gradient_transform` is not callable.
        ValueError: If `accum_steps` is not an int >= 1, `nonfinite` or
            `accum_dtype` is unknown, or the inner optimizer accumulates
            gradients itself.

    Example:
        >>> import keras, numpy as np
        >>> variable = keras.Variable(np.array([10.0]))
        >>> optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), accum_steps=2)
        >>> optimizer.apply([np.array([1.0])], [variable])
        >>> print(variable.numpy(), optimizer.cycle_position)
        [10.] 1
        >>> optimizer.apply([np.array([3.0])], [variable])
        >>> print(variable.numpy(), optimizer.cycle_position)
        [8.] 0
    """

    # Nothing here is for AutoGraph, which takes seconds to find that out.
    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
        weight: tf.Tensor | float | None = None,
    ) -> None:
        """Takes the gradients of one micro-batch; updates if it ends the cycle.

        Args:
            grads: Gradients of the micro-batch's mean loss. Item j has the
                shape of variable j: a dense tensor, a `tf.IndexedSlices`, or
                None, which adds nothing and loses nothing.
            trainable_variables: The variables, or None for those the optimizer
                was built with. Each list of variables has a cycle of its own.
            weight: The mean loss's denominator, scalar >= 0, such as the rows
                of the micro-batch. None means equal shares, except inside
                `fit` of an `AccumModel` or with an `AccumCallback`, where it
                means what the loss of the batch is divided by.

        Raises:
            ValueError: If there is no gradient at all, or not one item of
                `grads` per variable.
        """
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            call_checks.are_variables(trainable_variables)
            if not self.built:
                self.build(trainable_variables)
        elif not self.built:
            raise ValueError(
                "`trainable_variables` must be given on the first call because "
                "the optimizer is not built. Received: "
                "trainable_variables=None. Pass the list, or call "
                "optimizer.build(variables) first."
            )
        else:
            trainable_variables = self._trainable_variables
        optimizer_checks.same_number(grads, trainable_variables)
        call_checks.same_shapes(grads, trainable_variables)
        if not self.inner_optimizer.built:
            with tf.init_scope():
                self.inner_optimizer.build(self._trainable_variables)
        if not self.is_accumulating:
            self._apply_at_once(grads, trainable_variables, weight)
            return

        inner_update.warn_of_missing(grads, trainable_variables)
        cycle = self._buffers.cycle_of(trainable_variables)
        batch = micro_batch.present(self)
        weight, cycle.is_sum = self._weigh(batch, weight, cycle.weight_dtype)
        if batch is None:
            self._updater.take(cycle, grads, weight, None)
        else:
            self._updater.take(
                cycle,
                grads,
                weight,
                batch.num_rows,
                batch.num_skipped,
                batch.noise_sums,
            )
        self._count_micro_batch()

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, keras.Variable]],
        weight: tf.Tensor | float | None = None,
    ) -> keras.Variable:
        """As `apply`, from pairs; returns `iterations`."""
        grads, trainable_variables = call_checks.pairs(grads_and_vars)
        self.apply(grads, trainable_variables, weight)
        return self.iterations

    @contextlib.contextmanager
    def micro_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Weights calls of `apply` inside the block by what `batch` says.

        For training steps whose code calls `apply` without a weight.
        """
        with micro_batch.presented(self, batch):
            yield

    @property
    def is_in_micro_batch(self) -> bool:
        """True inside a block of `micro_batch`."""
        return micro_batch.present(self) is not None

    def flush(self) -> None:
        """Applies what a partial cycle has collected, divided by its weight.

        Without a partial cycle nothing happens.
        """
        if self._buffers is not None:
            for cycle in self._buffers.all_cycles():
                self._updater.flush(cycle)

    def reset(self) -> None:
        """Discards what a partial cycle has collected."""
        self.partial_cycle_is_stale = False
        if self._updater is not None:
            self._updater.reset()
        if self._ledger is not None:
            self._ledger.discard()

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales the loss as the inner optimizer does."""
        batch = micro_batch.present(self)
        if batch is not None and self.is_accumulating:
            length = self._accum_steps
            if self._buffers is not None:
                length = self._buffers.cycle_length
            loss = batch.numerator(loss, length)
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Sets final values as the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def _apply_at_once(self, grads, variables, weight):
        if not tf.executing_eagerly():
            self._was_traced_without_buffers = True
        replicas = self.replicas
        batch = micro_batch.present(self)
        if replicas.are_several:
            weight, is_sum = self._weigh(batch, weight, "float64")
            single_update.apply(
                self, replicas, grads, variables, weight, is_sum, batch
            )
            return
        if self._ledger is not None:
            present = [gradient for gradient in grads if gradient is not None]
            scale = inner_update.loss_scale(self)
            self._ledger.note_norm(
                ledger.global_norm(present, 1 if scale is None else scale)
            )
            if batch is not None:
                if batch.noise_sums is not None:
                    self._ledger.note_micro_batch(
                        present,
                        batch.weight,
                        batch.num_rows,
                        scale,
                        sums=batch.noise_sums,
                    )
                self._ledger.settle(self._ledger.pending(batch.num_rows))
                self._ledger.settle_noise(is_sum=batch.is_sum)
        self.inner_optimizer.apply(grads, variables)
        self.moments.absorb()
        self.moments.settle()

    def _weigh(self, batch, weight, dtype):
        """The weight of a call: as given, of the micro-batch, or one.

        And whether its loss is a sum.
        """
        is_sum = False
        if weight is None:
            weight = 1
            if batch is not None:
                weight, is_sum = batch.weight, batch.is_sum
                self._warn_of_denominators(batch)
        return checks.weight(weight, dtype), is_sum

    def _warn_of_denominators(self, batch):
        if batch.has_mixed_denominators and (
            not self._has_warned_of_denominators
        ):
            self._has_warned_of_denominators = True
            warnings.warn(
                "The outputs' losses are divided by different numbers (other "
                "masks, sample weights or reductions). Batches are weighted by "
                "their rows, which is not exactly the large batch.",
                stacklevel=2,
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the name, the inner optimizer and `accum_steps`."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "accum_steps": self.accum_steps,
            "nonfinite": self.nonfinite,
            "accum_dtype": self.accum_dtype,
            "gradient_transform": keras.saving.serialize_keras_object(
                self.gradient_transform
            ),
        }

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> "AccumOptimizer":
        """Makes an optimizer from what `get_config` returned."""
        config = dict(config)
        config["inner_optimizer"] = keras.saving.deserialize_keras_object(
            config.get("inner_optimizer"), custom_objects=custom_objects
        )
        config["gradient_transform"] = keras.saving.deserialize_keras_object(
            config.get("gradient_transform"), custom_objects=custom_objects
        )
        return cls(**config)
