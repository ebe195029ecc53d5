"""Runs a function on each micro-batch of a batch, one after the other.

One at a time, so that the memory is that of one micro-batch. In a graph the
loop is a `tf.while_loop`. XLA compiles for sizes that it knows: there the loop
runs over the full micro-batches, and the short one comes after it.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from accum_model.cut.chunks import Chunks

# body(index, data, num_rows, carry) -> (carry, tensors to keep)
Body = Callable[..., tuple[Any, list[tf.Tensor]]]


def run(
    chunks: Chunks,
    body: Body,
    carry: Any,
    kept: Sequence[tf.TensorSpec] = (),
) -> tuple[Any, list[tf.Tensor]]:
    """Calls `body` on each micro-batch, in order.

    Args:
        chunks: The micro-batches.
        body: Function of a micro-batch's index, data and rows, and of what is
            carried; returns the latter anew and a list of tensors to keep.
        carry: Nested structure of tensors, handed from call to call.
        kept: Specs of the tensors to keep, of any leading size.

    Returns:
        The last `carry`; and the kept tensors of all calls, each list
        concatenated along the leading dimension.
    """
    if tf.executing_eagerly():
        return _run_eagerly(chunks, body, carry, kept)
    if not chunks.use_xla:
        count = chunks.num_chunks
        carry, arrays = _loop(chunks, count, body, carry, kept)
        return carry, [array.concat() for array in arrays]
    carry, arrays = _loop(chunks, chunks.num_full, body, carry, kept, True)
    tensors = [_joined(array.stack()) for array in arrays]
    return _add_short_one(chunks, body, carry, tensors)


def _run_eagerly(chunks, body, carry, kept):
    parts: list[list[tf.Tensor]] = [[] for _ in kept]
    size, num_rows = int(chunks.size), int(chunks.num_rows)
    for index in range(int(chunks.num_chunks)):
        rows = min(size, num_rows - index * size)
        carry, tensors = body(index, chunks.at(index, rows), rows, carry)
        for part, tensor in zip(parts, tensors, strict=True):
            part.append(tensor)
    return carry, [tf.concat(part, 0) for part in parts]


def _loop(chunks, count, body, carry, kept, only_full=False):
    arrays = [
        tf.TensorArray(
            spec.dtype,
            tf.cast(count, "int32"),
            infer_shape=False,
            element_shape=spec.shape,
        )
        for spec in kept
    ]

    def step(index, carry, arrays):
        rows = chunks.size
        if not only_full:
            rows = tf.cast(rows, "int64")
            rows = tf.minimum(rows, chunks.num_rows - index * rows)
        carry, tensors = body(index, chunks.at(index, rows), rows, carry)
        arrays = [
            array.write(tf.cast(index, "int32"), tensor)
            for array, tensor in zip(arrays, tensors, strict=True)
        ]
        return index + 1, carry, arrays

    count = tf.cast(count, "int64")
    _, carry, arrays = tf.while_loop(
        lambda index, *_: index < count,
        step,
        (tf.zeros((), "int64"), carry, arrays),
        # More would hold the activations of several micro-batches at once.
        parallel_iterations=1,
    )
    return carry, arrays


def _add_short_one(chunks, body, carry, tensors):
    """Calls `body` on the rows that are left over, if there are any."""
    index, rows = chunks.num_full, chunks.num_left_over
    if isinstance(rows, int) and rows == 0:
        return carry, tensors

    def call():
        return body(index, chunks.at(index, rows), rows, carry)

    if isinstance(rows, int):
        carry, last = call()
    else:
        # The sizes are constants to XLA, which compiles one of the branches.
        nothing = [tensor[:0] for tensor in tensors]
        carry, last = tf.cond(rows > 0, call, lambda: (carry, nothing))
    return carry, [
        tf.concat(both, 0) for both in zip(tensors, last, strict=True)
    ]


def _joined(stacked):
    shape = tf.shape(stacked)
    joined = tf.reshape(
        stacked, tf.concat([shape[:1] * shape[1:2], shape[2:]], 0)
    )
    joined.set_shape([None, *stacked.shape[2:]])
    return joined
