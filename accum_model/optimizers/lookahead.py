"""Lookahead: k updates forward, one move of the slow weights.

After every :math:`k` updates of the inner optimizer, which have taken the fast
weights :math:`\\theta` from the slow ones :math:`\\phi` to somewhere else,

.. math:: \\phi \\leftarrow \\phi + \\alpha (\\theta - \\phi),
    \\qquad \\theta \\leftarrow \\phi.

Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back",
arXiv:1907.08610, algorithm 1.
"""

import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import optimizer_chain
from accum_model import optimizer_checks
from accum_model.accumulator import Gradient
from accum_model.optimizers import argument_checks
from accum_model.optimizers import dense_gradients
from accum_model.optimizers import wrapper


@keras.saving.register_keras_serializable(package="accum_model")
class Lookahead(wrapper.Wrapper):
    """Makes any optimizer look ahead before its weights are trusted.

    The model is trained with the fast weights, which the inner optimizer
    moves. After every `sync_period` updates the slow weights go a part of the
    way to them, and the fast weights start again from there. Updates are
    counted, not micro-batches and not updates that loss scaling skips, whether
    an `AccumOptimizer` or a `LossScaleOptimizer` stands outside or inside.

    Slow weights start as what the weights are when the optimizer is built. At
    the end of `fit` the model holds the slow weights, and a later `fit` goes
    on from them; where the inner optimizer has `use_ema=True` it holds the
    moving average of the fast weights. `LookaheadSwap` evaluates and saves
    with slow weights before that. Constraints act on the fast weights.

    Sparse gradients are taken as the dense ones they stand for. Under a
    `mixed_float16` policy Keras puts a `LossScaleOptimizer` outside; where you
    have put one inside, pass `auto_scale_loss=False` to `compile`.

    Args:
        inner_optimizer: Optimizer that makes the updates: a Keras optimizer, or
            the name or config of one.
        sync_period: int >= 1, k. Updates between two moves of the slow
            weights. Defaults to 5.
        slow_step_size: Number in (0, 1], alpha. Share of the way to the fast
            weights that the slow weights go. Defaults to 0.5.
        name: Name of the optimizer, or None for a generated one.
        **kwargs: Arguments of `keras.optimizers.Optimizer` that are to be set
            on the inner optimizer, such as `weight_decay` and `clipnorm`.

    Attributes:
        inner_optimizer: The optimizer that makes the updates.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer.
        ValueError: If another argument is not in its range, or contradicts the
            inner optimizer's.

    Example:
        >>> import keras, numpy as np
        >>> variable = keras.Variable(np.array([0.0]))
        >>> optimizer = Lookahead(keras.optimizers.SGD(1.0), sync_period=2)
        >>> for _ in range(2):
        ...     optimizer.apply([np.array([-1.0])], [variable])
        >>> print(variable.numpy())
        [1.]

    References:
        Zhang et al., `Lookahead Optimizer: k steps forward, 1 step back
        <https://arxiv.org/abs/1907.08610>`_, 2019, algorithm 1.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        sync_period: int = 5,
        slow_step_size: float = 0.5,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        sync_period = argument_checks.sync_period(sync_period)
        slow_step_size = argument_checks.slow_step_size(slow_step_size)
        super().__init__(inner_optimizer, name, **kwargs)
        self.sync_period = sync_period
        self.slow_step_size = slow_step_size
        self._slow_weights: list[keras.Variable | None] = []
        # True while variables that it was built for have no values yet.
        self._awaits_values = False

    # Updates.

    @property
    def slow_weights(self) -> list[keras.Variable | None]:
        """Slow weights, one per variable; empty before the optimizer is built.

        None for a variable that Keras overwrites with its gradient (float8
        scales).
        """
        return list(self._slow_weights)

    @property
    def fast_weights(self) -> list[keras.Variable]:
        """The variables that are trained, in the order of `slow_weights`."""
        return list(self._trainable_variables)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the inner optimizer's variables, and copies the weights."""
        if self.built:
            return
        variables = list(variables)
        with tf.init_scope():
            super().build(variables)
            self._slow_weights = [self._add_copy(each) for each in variables]

    # Nothing here is for AutoGraph, which takes seconds to find that out.
    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """As in Keras; every `sync_period` updates the slow weights move."""
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is not None:
            variables = list(trainable_variables)
            self.build(variables)
        elif self.built:
            variables = self._trainable_variables
        else:
            raise ValueError(
                "`trainable_variables` must be given on the first call because "
                "the optimizer is not built. Received: "
                "trainable_variables=None. Pass the list, or call "
                "optimizer.build(variables) first."
            )
        optimizer_checks.same_number(grads, variables)
        if not self.holds_cycles():
            grads = dense_gradients.merged(grads, variables)
        if self._awaits_values:
            self._copy_values()
        # The inner optimizer may skip an update, or only collect.
        before = tf.identity(tf.convert_to_tensor(self.iterations))
        self.inner_optimizer.apply(grads, variables)
        num_made = tf.convert_to_tensor(self.iterations) - before
        counter = self.own_iterations
        counter.assign_add(num_made)
        is_due = tf.math.floormod(counter.value, self.sync_period) == 0
        tf.cond(tf.logical_and(is_due, num_made > 0), self._move, lambda: None)

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Gives variables their slow weights, or the inner moving average."""
        if optimizer_chain.innermost(self).use_ema:
            self.inner_optimizer.finalize_variable_values(var_list)
        else:
            self.assign_slow_weights(var_list)

    def assign_slow_weights(
        self, variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Gives variables the values of their slow weights.

        Args:
            variables: The variables, or None for all. One that has no slow
                weight keeps its value.
        """
        wanted = None if variables is None else {id(each) for each in variables}
        for fast, slow in self._pairs():
            if wanted is None or id(fast) in wanted:
                fast.assign(slow)

    def restart(self) -> None:
        """Starts anew from the weights as they are.

        After weights were set or loaded without the optimizer's state, the
        slow weights would pull them back to where they were.
        """
        self.own_iterations.assign(0)
        self._awaits_values = False
        self._copy_fast()

    def _add_copy(self, variable):
        if getattr(variable, "overwrite_with_gradient", False):
            return None

        def initializer(shape, dtype=None):
            if _has_value(variable):
                return tf.convert_to_tensor(variable)
            self._awaits_values = True
            return tf.zeros(shape, dtype)

        # An initializer, because Keras initializes anew what is made while it
        # builds a model symbolically.
        return self.add_variable_from_reference(
            variable, "slow", initializer=initializer
        )

    def _copy_values(self):
        """Copies weights that had no values when the optimizer was built.

        A model that makes its variables in its first training step has it
        traced twice, and values in between. Only if TensorFlow cannot do that
        is the first trace run.
        """
        with tf.init_scope():
            if all(_has_value(fast) for fast, _ in self._pairs()):
                self._awaits_values = False
                self._copy_fast()
                return
        is_first = self.own_iterations.value == 0
        tf.cond(is_first, self._copy_fast, lambda: None)

    def _copy_fast(self):
        for fast, slow in self._pairs():
            slow.assign(fast)

    def _pairs(self):
        pairs = zip(self._trainable_variables, self._slow_weights, strict=True)
        return [(fast, slow) for fast, slow in pairs if slow is not None]

    def _move(self):
        for fast, slow in self._pairs():
            fast, slow = _native(fast), _native(slow)
            move = _move_function(slow.dtype, self.slow_step_size)
            move(fast.handle, slow.handle)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Takes over what `save_own_variables` wrote."""
        if self.fits(store):
            self._awaits_values = False
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, the inner optimizer as its config."""
        return {
            **super().get_config(),
            "sync_period": self.sync_period,
            "slow_step_size": self.slow_step_size,
        }


def _has_value(variable):
    """False for a variable whose first value is still to be computed."""
    variable = _native(variable)
    if isinstance(variable, tf.Variable):
        return bool(variable.is_initialized())
    return True


def _native(variable):
    """TensorFlow's variable behind one of Keras's."""
    return variable.value if isinstance(variable, keras.Variable) else variable


@functools.cache
def _move_function(dtype, slow_step_size):
    """Moves one slow weight and its fast one, whose handles it is given.

    A function that is not inlined: a model may have hundreds of variables, and
    a graph of as many calls is ready sooner than one of seven operations each.
    """

    def move(fast, slow):
        moved = tf.raw_ops.ReadVariableOp(resource=fast, dtype=dtype)
        if slow_step_size != 1:
            moved = moved_slow_weights(
                tf.raw_ops.ReadVariableOp(resource=slow, dtype=dtype),
                moved,
                tf.constant(slow_step_size, dtype),
            )
        tf.raw_ops.AssignVariableOp(resource=slow, value=moved)
        tf.raw_ops.AssignVariableOp(resource=fast, value=moved)

    handle = tf.TensorSpec((), "resource")
    # Not in the graph that happens to be traced: it serves others too.
    with tf.init_scope():
        return tf.function(
            move,
            input_signature=(handle, handle),
            autograph=False,
            experimental_attributes={"_noinline": True},
        ).get_concrete_function()


def moved_slow_weights(
    slow: tf.Tensor, fast: tf.Tensor, slow_step_size: tf.Tensor
) -> tf.Tensor:
    """The pure rule, for one variable."""
    return slow + slow_step_size * (fast - slow)
