"""What an accumulating optimizer holds: settings, counters, buffers, files.

What it does with them is in `optimizer`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import buffers
from accum_model import call_checks
from accum_model import checks
from accum_model import inner_update
from accum_model import ledger
from accum_model import nonfinite as nonfinite_module
from accum_model import optimizer_chain
from accum_model import optimizer_checks
from accum_model import pooled_moments
from accum_model import update
from accum_model.cycle_state import CycleState
from accum_model.replicas import Replicas


class OptimizerState(keras.optimizers.Optimizer):
    """The state of an `AccumOptimizer`; see there for the arguments."""

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        accum_steps: int = 1,
        *,
        nonfinite: str | None = None,
        accum_dtype: str | None = None,
        gradient_transform: Callable[..., Any] | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        call_checks.optimizer_keywords(others)
        inner_optimizer = optimizer_checks.optimizer(
            "inner_optimizer", inner_optimizer
        )
        accum_steps = checks.accum_steps(accum_steps)
        nonfinite = checks.nonfinite(nonfinite)
        accum_dtype = checks.accum_dtype(accum_dtype)
        gradient_transform = checks.gradient_transform(gradient_transform)
        optimizer_checks.not_nested(
            "inner_optimizer", inner_optimizer, OptimizerState
        )
        optimizer_checks.accumulates_once("inner_optimizer", inner_optimizer)
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
        self._has_warned_of_denominators = False
        self._was_traced_without_buffers = False
        # Of layers with moving statistics.
        self.moments = pooled_moments.PooledMoments(self.add_variable)
        self.cycle_state = CycleState(self._save_cycle, self._load_cycle)
        # The penalties on the weights of the model that is trained, or None.
        self.penalty: Callable[[], tf.Tensor | None] = lambda: None
        # True when what was collected does not belong to the next `fit`.
        self.partial_cycle_is_stale = False

    # Counters and settings.

    @property
    def iterations(self) -> keras.Variable:
        """Updates made, the counter of the innermost optimizer."""
        # LossScaleOptimizer passes its counter on only in newer Keras.
        return optimizer_chain.innermost(self).iterations

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
        """Micro-batches left out because a gradient was not finite.

        Those of the several replicas count one by one.
        """
        if self._guard is None:
            return 0
        pending = [
            buffers.concrete(cycle.num_spoiled)
            for cycle in self._buffers.all_cycles()
            if buffers.concrete(cycle.position)
        ]
        return sum(
            pending, buffers.concrete(self._guard.num_skipped_micro_batches)
        )

    @property
    def num_skipped_updates(self) -> int:
        """Cycles discarded because a gradient was not finite."""
        if self._guard is None:
            return 0
        return buffers.concrete(self._guard.num_skipped_updates)

    @property
    def replicas(self) -> Replicas:
        """Those that share the variables it was built for.

        Before that, those of the present strategy.
        """
        return Replicas.of(self._trainable_variables if self.built else [])

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
            self._ledger = ledger.RowLedger(self.replicas)
            if self._updater is not None:
                self._updater.ledger = self._ledger
        return self._ledger

    @property
    def gradient_norm(self) -> float | None:
        """Global norm of the last update's averaged gradient, before clipping.

        Known with an `AccumCallback`, and 0.0 until there was an update; None
        without one.
        """
        if self._ledger is None:
            return None
        return float(self._ledger.last_norm.numpy())

    @property
    def counts_rows(self) -> bool:
        """True when `count_rows` was called."""
        return self._ledger is not None

    @property
    def estimates_noise(self) -> bool:
        """True when somebody asks for the gradient noise scale."""
        return self._ledger is not None and self._ledger.noise is not None

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

    def _count_micro_batch(self):
        super().iterations.assign_add(1)

    @property
    def _guard(self):
        return None if self._updater is None else self._updater.guard

    # Building.

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the inner optimizer's variables, and the buffers."""
        variables = list(variables)
        replicas = Replicas.of(variables)

        def build():
            with tf.init_scope(), replicas.variables():
                if not self.inner_optimizer.built:
                    self.inner_optimizer.build(variables)
                super(OptimizerState, self).build(variables)
                if self.is_accumulating:
                    self._add_buffers()

        # A loop of one's own may build it in the first step of the replicas.
        replicas.together(build)

    def _add_buffers(self):
        replicas = self.replicas
        with tf.init_scope(), replicas.variables():
            # While calls were passed through, the own counter stood still.
            super().iterations.assign(self.iterations)
            self._buffers = buffers.Buffers(
                self._trainable_variables,
                self.add_variable,
                self._accum_steps,
                replicas,
                self.accum_dtype,
            )
            policy = self.nonfinite
            if policy is None and inner_update.loss_scaling(self) is not None:
                policy = "skip_update"
            guard = policy and nonfinite_module.Guard(policy, self.add_variable)
            self._updater = update.Updater(self, self._buffers, guard)
            self._updater.ledger = self._ledger
            self.moments.build()

    # Files.

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
        self.moments.save(store)
        if self._guard is not None:
            for name, variable in self._guard.state().items():
                store[name] = variable.numpy()

    def _load_cycle(self, store):
        if "num_micro_batches" not in store.keys() or not self.built:
            return  # Of a plain model; or Keras has said that it skips.
        if self._buffers is None:
            self.start_accumulating()
        self._buffers.load(store)
        self.moments.load(store)
        super().iterations.assign(store["num_micro_batches"])
        if self._guard is not None:
            for name, variable in self._guard.state().items():
                if name in store.keys():
                    variable.assign(store[name])
