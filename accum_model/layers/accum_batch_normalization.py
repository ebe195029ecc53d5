"""Batch normalisation whose moving statistics move once per update."""

from typing import Any

import keras
import tensorflow as tf

from accum_model import pooled_moments


@keras.saving.register_keras_serializable(
    package="accum_model", name="AccumBatchNormalization"
)
class AccumBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation that accumulates its moments too.

    A drop-in for `keras.layers.BatchNormalization`: the same arguments, the
    same weights, in the same files. In a training step that accumulates,
    `moving_mean` and `moving_variance` stand still until the update, and then
    move once, by mean and variance of all rows that the update has seen, as
    they would for the large batch. Micro-batches that are left out of the
    update are left out of the moments.

    What it cannot change: within a training step the rows of a micro-batch are
    normalised by the moments of that micro-batch, because those of the others
    are not known yet. So the gradient is not quite that of the large batch.

    Anywhere else (another training loop, `accum_steps=1`, frozen) it is plain
    batch normalisation. So it is in files and summaries, where it goes by the
    name of `BatchNormalization`.

    Args:
        *args: As for `keras.layers.BatchNormalization`.
        **kwargs: As for `keras.layers.BatchNormalization`, `renorm` excepted.

    Raises:
        ValueError: If `renorm` is True.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([
        ...     keras.Input((1,)),
        ...     AccumBatchNormalization(momentum=0.0),
        ...     keras.layers.Dense(1),
        ... ])
        >>> model.compile("sgd", "mse")
        >>> x = np.array([[0.0], [2.0], [10.0], [12.0]])
        >>> history = model.fit(
        ...     x, x, batch_size=2, shuffle=False, verbose=0,
        ...     callbacks=[AccumCallback(accum_steps=2, verbose=0)])
        >>> print(model.layers[0].moving_mean.numpy(),
        ...       model.layers[0].moving_variance.numpy())
        [6.] [26.]
    """

    # Seen by `pooled_moments`, which has to come before layers.
    pools_moments = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("renorm"):
            raise ValueError(
                "`renorm` must be False because batch renormalisation corrects "
                "each micro-batch by statistics that are to stand still. "
                "Received: renorm=True (of type bool). Leave it out, or take "
                "keras.layers.BatchNormalization."
            )
        super().__init__(*args, **kwargs)

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """As in Keras; in a step that accumulates no statistics move."""
        pool = pooled_moments.current()
        is_plain = pool is None or not training or not self.trainable
        if is_plain or not _fits(mask, inputs):
            return super().call(inputs, training=training, mask=mask)
        # As in Keras: half precision would overflow.
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        inputs = tf.cast(inputs, dtype)
        count, mean, variance = self._moments_of(inputs, mask)
        pool.stage(self, count, mean, variance)
        outputs = keras.ops.batch_normalization(
            inputs,
            mean,
            variance,
            self.axis,
            offset=tf.cast(self.beta, dtype) if self.center else None,
            scale=tf.cast(self.gamma, dtype) if self.scale else None,
            epsilon=self.epsilon,
        )
        return tf.cast(outputs, self.compute_dtype)

    def _moments_of(self, inputs, mask):
        """Elements per channel, their means and their variances."""
        rank = len(inputs.shape)
        axes = [axis for axis in range(rank) if axis != self.axis % rank]
        if mask is None:
            mean, variance = keras.ops.moments(
                inputs, axes, synchronized=self.synchronized
            )
            count = tf.size(inputs) // tf.shape(inputs)[self.axis]
            return count, mean, variance
        mask = tf.cast(tf.expand_dims(mask, -1), "bool")
        mask = tf.broadcast_to(mask, tf.shape(inputs))
        zeros = tf.zeros_like(inputs)
        counts = tf.reduce_sum(tf.cast(mask, inputs.dtype), axes)
        mean = tf.math.divide_no_nan(
            tf.reduce_sum(tf.where(mask, inputs, zeros), axes), counts
        )
        shape = [1] * rank
        shape[self.axis] = -1
        away = tf.where(mask, inputs - tf.reshape(mean, shape), zeros)
        variance = tf.math.divide_no_nan(
            tf.reduce_sum(tf.square(away), axes), counts
        )
        return counts[0], mean, variance


# Keras addresses the layers of a file by the names of their classes. Under this
# one, weight files go both ways.
AccumBatchNormalization.__name__ = "BatchNormalization"


def _fits(mask, inputs):
    return mask is None or len(mask.shape) == len(inputs.shape) - 1
