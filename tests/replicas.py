"""Strategies of several replicas in one process, and a model under them."""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests import helpers


class CountingReduction(tf.distribute.ReductionToOneDevice):
    """Sums on one device, and counts exchanges when they really run.

    Attributes:
        sizes: Numbers in each exchange so far, in the order they ran.
    """

    def __init__(self):
        super().__init__()
        self.sizes = []

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        size = sum(int(np.prod(v.values[0].shape or [1])) for v, _ in pairs)

        def count():
            self.sizes.append(size)

        tf.py_function(count, [], [])
        return super().batch_reduce_implementation(reduce_op, pairs, options)


@functools.cache
def mirrored(num_replicas):
    """One object each: several of the same devices get into each other's way.

    Sums on one device, because TensorFlow's default for several CPUs is for
    one strategy in a process.
    """
    return tf.distribute.MirroredStrategy(
        [f"CPU:{number}" for number in range(num_replicas)],
        cross_device_ops=CountingReduction(),
    )


def fitted(make, optimizer, data, batch_size, strategy=None, **kwargs):
    """A model that `make` has made, compiled and fitted for two epochs.

    Args:
        make: Makes the model.
        optimizer: Makes the optimizer.
        data: Inputs and targets.
        batch_size: Rows of a batch, of all replicas.
        strategy: Under which strategy, or None.
        **kwargs: `loss`, `sample_weight`, `callbacks`, `compile_kwargs`.
    """
    loss = kwargs.pop("loss", "mse")
    compile_kwargs = kwargs.pop("compile_kwargs", {})
    keras.utils.set_random_seed(0)
    scope = (strategy or tf.distribute.get_strategy()).scope()
    with scope:
        model = helpers.with_known_weights(make())
        model.compile(
            optimizer(), loss() if callable(loss) else loss, **compile_kwargs
        )
    model.fit(
        *data,
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
        **kwargs,
    )
    return model


def assert_copies_are_equal(model, strategy):
    """Every weight and slot has the same bits on each replica."""
    for variable in [*model.variables, *model.optimizer.variables]:
        synchronization = variable.value.synchronization
        if synchronization == tf.VariableSynchronization.ON_READ:
            continue
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())
