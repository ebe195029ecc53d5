"""How many rows a batch has, whatever its structure."""

from typing import Any

import keras
import tensorflow as tf


def num_rows(data: Any) -> tf.Tensor:
    """The rows of a batch: the leading size of its first tensor.

    Args:
        data: What a training step receives: a tensor or any nesting of tuples,
            lists and dicts, dense, ragged or sparse; None is passed over.

    Returns:
        int64 scalar tensor.

    Raises:
        ValueError: If the first tensor is a scalar.
    """
    for leaf in keras.tree.flatten(data):
        if leaf is None:
            continue
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), "int64")
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], "int64")
        leaf = tf.convert_to_tensor(leaf)
        if leaf.shape.rank == 0:
            raise ValueError(
                "Training data must have a batch dimension. Received: a first "
                f"tensor of shape {tuple(leaf.shape)}. Give it the shape "
                "(rows, ...)."
            )
        return tf.shape(leaf, out_type="int64")[0]
    raise ValueError(
        "Training data must hold a tensor. Received: no tensor in the batch. "
        "Check what the data set yields."
    )
