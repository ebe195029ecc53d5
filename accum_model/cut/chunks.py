"""A batch of data, cut into micro-batches of rows.

Every row is in one micro-batch, in the order of the batch; only the last one
may be shorter than the others, and none is empty.
"""

from typing import Any

import keras
import tensorflow as tf

from accum_model.cut import cut_checks


class Chunks:
    """The micro-batches of one batch.

    Args:
        data: What a training step receives: tensors of equal leading size in
            any nesting of tuples, lists and dicts, dense, ragged or sparse;
            None is passed over.
        size: Rows per micro-batch: int >= 1, int64 scalar tensor, or None for
            the whole batch.
        use_xla: True when XLA compiles the step. Defaults to False.

    Attributes:
        data: As given.
        use_xla: As given.
        num_rows: Rows of the batch, an int where they are known when a graph is
            traced, else an int64 scalar tensor.
        size: Rows of every micro-batch but the last: like `num_rows`.

    Raises:
        ValueError: If a tensor has no batch dimension, or leading sizes differ.
    """

    def __init__(
        self, data: Any, size: int | tf.Tensor | None, use_xla: bool = False
    ) -> None:
        sizes = [
            _leading_size(leaf)
            for leaf in keras.tree.flatten(data)
            if leaf is not None
        ]
        self.data = data
        self.use_xla = use_xla
        self.num_rows = cut_checks.equal_leading_sizes(sizes, not use_xla)
        if size is None:
            size = self.num_rows
        if _are_ints(size, self.num_rows):
            self.size = max(1, min(size, self.num_rows))
        else:
            self.size = tf.minimum(tf.cast(size, "int64"), self.num_rows)
            # A batch without rows is one micro-batch without rows.
            self.size = tf.maximum(self.size, 1)

    @property
    def num_full(self) -> int | tf.Tensor:
        """How many micro-batches have `size` rows."""
        return self.num_rows // self.size

    @property
    def num_chunks(self) -> int | tf.Tensor:
        """How many micro-batches there are."""
        if _are_ints(self.num_rows, self.size):
            return max(1, -(-self.num_rows // self.size))
        return tf.maximum(-(-self.num_rows // self.size), 1)

    @property
    def num_left_over(self) -> int | tf.Tensor:
        """Rows of the last micro-batch if it is short, else 0."""
        return self.num_rows - self.num_full * self.size

    def at(self, index: int | tf.Tensor, num_rows: int | tf.Tensor) -> Any:
        """The `num_rows` rows from the start of micro-batch `index`.

        Args:
            index: Which micro-batch, from 0.
            num_rows: An int makes slices of static size, which XLA asks for.
        """
        begin = index * self.size
        return keras.tree.map_structure(
            lambda leaf: _rows_of(leaf, begin, num_rows), self.data
        )

    def share(self, num_rows: int | tf.Tensor) -> tf.Tensor:
        """`num_rows` as a part of the batch, float64 scalar."""
        return tf.math.divide_no_nan(
            tf.cast(num_rows, "float64"), tf.cast(self.num_rows, "float64")
        )


def _leading_size(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.shape[0] or tf.cast(leaf.nrows(), "int64")
    if isinstance(leaf, tf.SparseTensor):
        return leaf.shape[0] or tf.cast(leaf.dense_shape[0], "int64")
    leaf = tf.convert_to_tensor(leaf)
    cut_checks.batch_dimension(leaf)
    if leaf.shape.rank is not None and leaf.shape[0] is not None:
        return leaf.shape[0]
    return tf.shape(leaf, out_type="int64")[0]


def _rows_of(leaf, begin, num_rows):
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[begin : begin + num_rows]
    is_sparse = isinstance(leaf, tf.SparseTensor)
    if is_sparse:
        shape = tf.cast(leaf.dense_shape, "int64")
    else:
        leaf = tf.convert_to_tensor(leaf)
        shape = tf.shape(leaf, out_type="int64")
    begin = tf.reshape(tf.cast(begin, "int64"), (1,))
    rows = tf.reshape(tf.cast(num_rows, "int64"), (1,))
    part = (tf.sparse.slice if is_sparse else tf.slice)(
        leaf,
        tf.concat([begin, tf.zeros_like(shape[1:])], 0),
        tf.concat([rows, shape[1:]], 0),
    )
    if is_sparse:
        return part
    if leaf.shape.rank is not None:
        # What XLA and layers want to know of sizes that tensors hold.
        static = num_rows if isinstance(num_rows, int) else None
        part.set_shape([static, *leaf.shape[1:]])
    return part


def _are_ints(*values):
    return all(isinstance(value, int) for value in values)
