"""The optimizer wrapper: one update of the inner optimizer per cycle.

`apply` adds the gradients of a micro-batch to buffers; the micro-batch that
ends the cycle applies the weighted mean

.. math:: \\bar g = \\sum_i w_i g_i \\, / \\, \\sum_i w_i

with the inner optimizer. Between updates nothing but the buffers changes.
"""

import contextlib
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import buffers
from accum_model import checks
from accum_model import ledger
from accum_model import nonfinite as nonfinite_module
from accum_model import update
from accum_model.accumulator import Gradient
from accum_model.cycle_state import CycleState
from accum_model.micro_batch import MicroBatch


@keras.saving.register_keras_serializable(package="accum_model")
class AccumOptimizer(keras.optimizers.Optimizer):
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

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        accum_steps: int = 1,
        *,
        nonfinite: str | None = None,
        accum_dtype: str | None = None,
        gradient_transform: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        accum_steps = checks.accum_steps(accum_steps)
        nonfinite = checks.nonfinite(nonfinite)
        accum_dtype = checks.accum_dtype(accum_dtype)
        gradient_transform = checks.gradient_transform(gradient_transform)
        inner_optimizer = checks.optimizer("inner_optimizer", inner_optimizer)
        checks.not_nested("inner_optimizer", inner_optimizer, AccumOptimizer)
        checks.accumulates_once("inner_optimizer", inner_optimizer)
        # A callable makes no variable; the rate is the inner optimizer's.
        super().__init__(
            learning_rate=lambda: self.inner_optimizer.learning_rate, name=name
        )
        self.inner_optimizer = inner_optimizer
        self.nonfinite = nonfinite
        self.accum_dtype = accum_dtype
        self.gradient_transform = gradient_transform
        self._accum_steps = accum_steps
        # Buffers are needed for more than accum_steps: for what looks at the
        # gradients of an update.
        self._needs_buffers = bool(nonfinite or gradient_transform)
        self._updater: update.Updater | None = None
        self._buffers: buffers.Buffers | None = None
        self._ledger: ledger.RowLedger | None = None
        self._micro_batch: MicroBatch | None = None
        self._has_warned_of_denominators = False
        self._was_traced_without_buffers = False
        self.cycle_state = CycleState(self._save_cycle, self._load_cycle)
        # True when what was collected does not belong to the next `fit`.
        self.partial_cycle_is_stale = False

    # Counters and settings.

    @property
    def iterations(self) -> keras.Variable:
        """Updates made, the counter of the innermost optimizer."""
        optimizer = self.inner_optimizer
        # LossScaleOptimizer passes its counter on only in newer Keras.
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        return optimizer.iterations

    @property
    def num_micro_batches(self) -> int:
        """Calls of `apply` so far; in `fit` one per batch of data."""
        if self._buffers is None:
            return buffers.concrete(self.iterations)
        return buffers.concrete(super().iterations)

    @property
    def cycle_position(self) -> int:
        """Micro-batches collected since the last update.

        With several lists of variables, the sum over their cycles.
        """
        if self._buffers is None:
            return 0
        cycles = self._buffers.all_cycles()
        return sum(buffers.concrete(cycle.position) for cycle in cycles)

    @property
    def num_skipped_micro_batches(self) -> int:
        """Micro-batches left out because a gradient was not finite."""
        if self._guard is None:
            return 0
        return buffers.concrete(self._guard.num_skipped_micro_batches)

    @property
    def num_skipped_updates(self) -> int:
        """Cycles discarded because a gradient was not finite."""
        if self._guard is None:
            return 0
        return buffers.concrete(self._guard.num_skipped_updates)

    @property
    def is_accumulating(self) -> bool:
        """True when there are buffers, or will be once it is built."""
        return (
            self._buffers is not None
            or self._needs_buffers
            or self._accum_steps > 1
        )

    @property
    def accum_steps(self) -> int:
        """Micro-batches per update.

        A new value holds from the next cycle on. Setting more than 1 where it
        was 1 makes the buffers.

        Raises:
            ValueError: If set to anything but an int >= 1.
            RuntimeError: If `apply` was compiled into a graph without buffers;
                `AccumModel` sees to the new graph itself.
        """
        if self._buffers is None:
            return self._accum_steps
        return buffers.concrete(self._buffers.accum_steps)

    @accum_steps.setter
    def accum_steps(self, accum_steps: int) -> None:
        accum_steps = checks.accum_steps(accum_steps)
        if accum_steps > 1 and not self.is_accumulating:
            if self._was_traced_without_buffers:
                raise RuntimeError(
                    "`accum_steps` cannot go from 1 to more here because the "
                    "training step was compiled without buffers. "
                    f"{checks.received('accum_steps', accum_steps)} "
                    "Call model.compile again, or use AccumModel or "
                    "AccumCallback, which renew the training step themselves."
                )
            self._accum_steps = accum_steps
            self.start_accumulating()
        if self._buffers is None:
            self._accum_steps = accum_steps
        else:
            self._buffers.set_accum_steps(accum_steps)

    def start_accumulating(self) -> None:
        """Makes buffers whatever `accum_steps` is.

        For a schedule that starts at 1 and for going from 1 to more. A
        training step that was compiled before has to be made again.
        """
        self._was_traced_without_buffers = False
        self._needs_buffers = True
        if self.built and self._buffers is None:
            self._add_buffers()

    def count_rows(self) -> ledger.RowLedger:
        """Starts counting rows for the logs, in steps compiled from now on."""
        if self._ledger is None:
            self._ledger = ledger.RowLedger()
            if self._updater is not None:
                self._updater.ledger = self._ledger
        return self._ledger

    @property
    def counts_rows(self) -> bool:
        """True when `count_rows` was called."""
        return self._ledger is not None

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def variables(self) -> list[keras.Variable]:
        """Own variables, then the inner optimizer's."""
        if not self.is_accumulating:
            return self.inner_optimizer.variables
        return super().variables + self.inner_optimizer.variables

    @property
    def _guard(self):
        return None if self._updater is None else self._updater.guard

    # Applying.

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
        if not self.inner_optimizer.built:
            with tf.init_scope():
                self.inner_optimizer.build(self._trainable_variables)
        if not self.is_accumulating:
            self._apply_at_once(grads, trainable_variables)
            return

        checks.same_number(grads, trainable_variables)
        update.warn_of_missing(grads, trainable_variables)
        cycle = self._buffers.cycle_of(trainable_variables)
        weight = self._weigh(cycle, weight)
        batch = self._micro_batch
        self._updater.take(
            cycle, grads, weight, None if batch is None else batch.num_rows
        )
        super().iterations.assign_add(1)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, keras.Variable]],
        weight: tf.Tensor | float | None = None,
    ) -> keras.Variable:
        """As `apply`, from pairs; returns `iterations`."""
        grads, trainable_variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, trainable_variables, weight)
        return self.iterations

    @contextlib.contextmanager
    def micro_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Weights calls of `apply` inside the block by what `batch` says.

        For training steps whose code calls `apply` without a weight.
        """
        before, self._micro_batch = self._micro_batch, batch
        try:
            yield
        finally:
            self._micro_batch = before

    @property
    def is_in_micro_batch(self) -> bool:
        """True inside a block of `micro_batch`."""
        return self._micro_batch is not None

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
        batch = self._micro_batch
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

    def _apply_at_once(self, grads, variables):
        if not tf.executing_eagerly():
            self._was_traced_without_buffers = True
        self.inner_optimizer.apply(grads, variables)
        if self._ledger is not None and self._micro_batch is not None:
            self._ledger.settle(self._micro_batch.num_rows)

    def _weigh(self, cycle, weight):
        """The weight of a call: as given, of the micro-batch, or one."""
        batch = self._micro_batch
        is_sum = False
        if weight is None:
            weight = 1
            if batch is not None:
                weight, is_sum = batch.weight, batch.is_sum
                self._warn_of_denominators(batch)
        weight = checks.weight(weight, cycle.weight_dtype)
        cycle.mark_sum(is_sum)
        self._updater.penalty = batch.penalty if is_sum else lambda: None
        return weight

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

    # Building.

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the inner optimizer's variables, and the buffers."""
        variables = list(variables)
        with tf.init_scope():
            if not self.inner_optimizer.built:
                self.inner_optimizer.build(variables)
            super().build(variables)
            if self.is_accumulating:
                self._add_buffers()

    def _add_buffers(self):
        checks.one_replica(self._accum_steps)
        with tf.init_scope():
            # While calls were passed through, the own counter stood still.
            super().iterations.assign(self.iterations)
            self._buffers = buffers.Buffers(
                self._trainable_variables,
                self.add_variable,
                self._accum_steps,
                self.accum_dtype,
            )
            policy = self.nonfinite
            if policy is None and update.loss_scaling(self) is not None:
                policy = "skip_update"
            guard = policy and nonfinite_module.Guard(policy, self.add_variable)
            self._updater = update.Updater(self, self._buffers, guard)
            self._updater.ledger = self._ledger

    # Saving.

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

    def __dir__(self) -> list[str]:
        # Keras saves every optimizer it finds among the attributes. The inner
        # one is saved as this one's own variables, where a plain model looks.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes the inner optimizer's state, as a plain model's file has it.

        What the cycle has collected is written beside it.
        """
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Takes over the inner optimizer's state and starts a new cycle.

        The file may be of a plain model. What a cycle had collected, if the
        file holds any, is loaded next.
        """
        self.inner_optimizer.load_own_variables(store)
        self.partial_cycle_is_stale = False
        if self._updater is not None:
            super().iterations.assign(self.iterations)
            self._updater.reset()

    def _save_cycle(self, store):
        if self._buffers is None:
            return
        store["num_micro_batches"] = super().iterations.numpy()
        self._buffers.save(store)
        if self._guard is not None:
            for name, variable in self._guard.state().items():
                store[name] = variable.numpy()

    def _load_cycle(self, store):
        if "num_micro_batches" not in store.keys() or not self.built:
            return  # Of a plain model; or Keras has said that it skips.
        if self._buffers is None:
            self.start_accumulating()
        self._buffers.load(store)
        super().iterations.assign(store["num_micro_batches"])
        if self._guard is not None:
            for name, variable in self._guard.state().items():
                if name in store.keys():
                    variable.assign(store[name])

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> "AccumOptimizer":
        """Makes an optimizer from what `get_config` returned."""
        config = dict(config)
        config["inner_optimizer"] = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        config["gradient_transform"] = keras.saving.deserialize_keras_object(
            config.get("gradient_transform"), custom_objects=custom_objects
        )
        return cls(**config)
