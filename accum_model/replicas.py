"""What differs where several replicas train one model.

The replicas of a `tf.distribute.Strategy` run a step at the same time, each on
its rows of the batch. What a cycle collects stays on the replica. The update
takes place once for all of them, in cross-replica context, because a condition
may not enclose what replicas do together unless it does so for all at once.

With one replica every method calls or returns what it is given.
"""

import contextlib
import contextvars
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import model_checks

# A value that is one tensor on one replica; several, held together, on more.
Value = Any


class Replicas:
    """The replicas that share one list of variables.

    Args:
        strategy: The strategy under which the variables were made.

    Attributes:
        strategy: As given.
        count: int >= 1, replicas on all machines.

    Raises:
        ValueError: If the replicas of `strategy` do not share their updates.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = model_checks.strategy(strategy)
        self.count: int = strategy.num_replicas_in_sync

    @classmethod
    def of(cls, variables: Sequence[keras.Variable]) -> "Replicas":
        """Those that `variables` were made for."""
        for variable in variables:
            value = getattr(variable, "value", variable)
            strategy = getattr(value, "distribute_strategy", None)
            if strategy is not None:
                return cls(strategy)
        return cls(tf.distribute.get_strategy())

    @property
    def are_several(self) -> bool:
        """True when there is anything to be done together."""
        return self.count > 1

    def together(self, function: Callable[..., Any], *args: Value) -> Any:
        """Calls `function` once for all replicas.

        Args:
            function: Called in cross-replica context.
            *args: Its arguments; tensors of one replica become values of all.
        """
        if not self.are_several:
            return function(*args)
        if tf.distribute.get_strategy() is not self.strategy:
            with self.strategy.scope():
                return function(*args)
        if tf.distribute.in_cross_replica_context():
            return function(*args)
        # What the step has set for itself does not reach other threads.
        context = contextvars.copy_context()
        return tf.distribute.get_replica_context().merge_call(
            lambda strategy, *merged: context.run(function, *merged), args=args
        )

    def on_each(self, function: Callable[..., Any], *args: Value) -> Value:
        """Calls `function` on every replica, with its part of the values.

        In cross-replica context.
        """
        if not self.are_several:
            return function(*args)
        context = contextvars.copy_context()
        return self.strategy.extended.call_for_each_replica(
            lambda *own: context.copy().run(function, *own), args=args
        )

    def total(self, values: Sequence[Value]) -> list[Value]:
        """Sums of the replicas' values, on each of them: one exchange.

        In cross-replica context.
        """
        if not self.are_several:
            return list(values)
        values = self.on_each(
            # A variable that was only read names no device to exchange on.
            lambda own: [
                each
                if isinstance(each, tf.IndexedSlices)
                else tf.identity(each)
                for each in own
            ],
            list(values),
        )
        return self.strategy.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM, [(value, value) for value in values]
        )

    def totals(self, counts: Mapping[str, Value]) -> dict[str, tf.Tensor]:
        """Sums of the replicas' counts, float64: one exchange.

        In cross-replica context.
        """
        values = self.on_each(
            lambda counts: [tf.cast(each, "float64") for each in counts],
            list(counts.values()),
        )
        sums = [self.first(each) for each in self.total(values)]
        return dict(zip(counts, sums, strict=True))

    def of_large_batch(
        self, gradients: Sequence[tf.Tensor], weight: tf.Tensor
    ) -> list[tf.Tensor]:
        """The gradients of all replicas' rows: one exchange.

        On each replica, with what is its own.

        Args:
            gradients: Dense gradients of the replica's rows. Means have been
                divided by the replicas, as Keras does.
            weight: The denominator of the replica's mean, scalar; 1 for a sum.
        """
        if not self.are_several:
            return list(gradients)
        # A replica without rows has no weight, and may have NaN.
        weighted = [
            tf.math.multiply_no_nan(each, tf.cast(weight, each.dtype))
            for each in gradients
        ]
        *sums, total_weight = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, [*weighted, weight]
        )
        mean_weight = total_weight / self.count
        return [
            tf.math.divide_no_nan(each, tf.cast(mean_weight, each.dtype))
            for each in sums
        ]

    def first(self, value: Value) -> tf.Tensor:
        """The value of the first local replica, of one that all share."""
        if not self.are_several:
            return value
        return self.strategy.experimental_local_results(value)[0]

    def local_parts(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """The variables of this machine's replicas that make up one."""
        if not self.are_several:
            return [variable.value]
        return self.strategy.experimental_local_results(variable.value)

    def variables(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which variables are made that all replicas share."""
        if not self.are_several:
            return contextlib.nullcontext()
        return self.strategy.scope()

    @contextlib.contextmanager
    def local_variables(self) -> Any:
        """A block in which variables are made that each replica has for itself.

        Read in cross-replica context they are the sum over the replicas.
        """
        if not self.are_several:
            yield
            return

        def create(next_creator, **kwargs):
            kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
            kwargs["aggregation"] = tf.VariableAggregation.SUM
            return next_creator(**kwargs)

        with self.strategy.scope(), tf.variable_creator_scope(create):
            yield

    def assign_total(self, variable: keras.Variable, value: Any) -> None:
        """Gives a local variable a value whose sum over replicas is `value`.

        Outside of a step. The first replica holds all of it: nothing is
        rounded.
        """
        if not self.are_several:
            variable.assign(value)
            return
        value = tf.convert_to_tensor(value, variable.dtype)

        def assign():
            context = tf.distribute.get_replica_context()
            is_first = context.replica_id_in_sync_group == 0
            own = tf.where(is_first, value, tf.zeros_like(value))
            variable.value.assign(own)

        self.strategy.run(tf.function(assign))
