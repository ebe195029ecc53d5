"""Steps on several machines, which Keras's own training function cannot take.

Keras averages what a step returns over an axis that scalars lack. Here each
machine shows what its own step returns, and nothing is exchanged for it; at the
end of an epoch Keras reads the metrics of all of them.

Public report: keras-team/keras#20585.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from accum_model import data_rows
from accum_model import shadow

Step = Callable[[Any], Any]


def are_needed(strategy: tf.distribute.Strategy) -> bool:
    """True where the replicas of `strategy` are on several machines."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)


def make(model: keras.Model, step: Step) -> Callable[[Any], Any]:
    """Returns the function that Keras calls with an iterator.

    Args:
        model: Says how steps are run: compiled or not, how many at a time.
        step: A training or validation step of one replica, `step(data)`.
    """
    strategy = model.distribute_strategy

    def run_one(data):
        num_rows = data_rows.num_rows(data)

        def compute_loss(compute_loss, *args, **kwargs):
            loss = compute_loss(*args, **kwargs)
            # A mean over no rows is no number, and would be shown. Where Keras
            # knows that there are none, it returns the losses of no rows.
            if loss.shape.num_elements() == 0:
                loss = tf.reduce_sum(loss)
            return tf.where(num_rows > 0, loss, tf.zeros_like(loss))

        with shadow.method(model, "compute_loss", compute_loss):
            return step(data)

    def run(data):
        outputs = strategy.run(run_one, args=(data,))
        return keras.tree.map_structure(
            lambda each: strategy.experimental_local_results(each)[0], outputs
        )

    if not model.run_eagerly:
        run = tf.function(run, reduce_retracing=True, autograph=False)

    def run_several(iterator):
        outputs = None
        for _ in range(model.steps_per_execution):
            try:
                data = next(iterator)
            except StopIteration:
                if outputs is None:
                    raise
                break
            outputs = run(keras.tree.map_structure(_without_optionals, data))
        return outputs

    return run_several


def _without_optionals(value):
    """Keras writes None in a dataset as an optional without a value."""
    return None if isinstance(value, tf.experimental.Optional) else value
