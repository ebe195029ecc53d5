"""The ways to train on a batch by micro-batches that benchmarks compare.

All train the same model with Adam, on the same data, from the same weights.
Steps run as in `fit`: Keras's own train function on an iterator of a data set.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from benchmarks import _cases

LIMIT = "limit"
SMALL = "plain Keras, micro-batch"
UNCUT = "plain Keras, large batch"
BUILT_IN = "Keras's built-in accumulation"
NOTHING = "accum_steps=1, large batch"
ACROSS = "across steps"
CALLBACK = "across steps, callback"
CUT = "in one step"
CUT_XLA = "in one step, XLA"
CUT_BATCH_LOSS = "in one step, batch loss"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all columns have in common.

    Attributes:
        batch_size: Rows per update.
        micro_batch_size: Rows per forward and backward pass.
        jit_compile: True to compile steps with XLA.
    """

    batch_size: int
    micro_batch_size: int
    jit_compile: bool = False

    @property
    def num_micro_batches(self) -> int:
        """Forward and backward passes per update."""
        return self.batch_size // self.micro_batch_size


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model and a way to train it.

    Attributes:
        model: The model.
        update: Trains it on one batch.
    """

    model: keras.Model
    update: Callable[[], object]


def limit(case: _cases.Case, settings: Settings) -> Trainer:
    """Nothing but the passes, the sum of their gradients and the update.

    Micro-batches lie ready, and sparse gradients stay sparse until the update.
    """
    model, optimizer, loss = case.model(), _adam(), _loss()
    variables = model.trainable_variables
    optimizer.build(variables)
    count = settings.num_micro_batches
    x, y = (np.split(each, count) for each in case.data(settings.batch_size))
    parts = list(zip(map(tf.constant, x), map(tf.constant, y), strict=True))

    @tf.function(jit_compile=settings.jit_compile)
    def forward_backward(x, y, sums):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, variables)
        return gradients if sums is None else list(map(_sum, sums, gradients))

    @tf.function(jit_compile=settings.jit_compile)
    def apply(sums):
        optimizer.apply([_divided(total, count) for total in sums], variables)

    def update():
        sums = None
        for part in parts:
            sums = forward_backward(*part, sums)
        apply(sums)

    return Trainer(model, update)


def plain(case: _cases.Case, settings: Settings) -> Trainer:
    """Plain Keras on the whole batch."""
    return _in_fit(case.model(), case, settings, settings.batch_size)


def plain_small(case: _cases.Case, settings: Settings) -> Trainer:
    """Plain Keras on micro-batches, with an update after each.

    The only column that trains to other weights.
    """
    return _in_fit(case.model(), case, settings, settings.micro_batch_size)


def built_in(case: _cases.Case, settings: Settings) -> Trainer:
    """Keras's `gradient_accumulation_steps`, one batch per micro-batch."""
    count = settings.num_micro_batches
    # Keras refuses 1.
    adam = {"gradient_accumulation_steps": count} if count > 1 else {}
    return _in_fit(
        case.model(), case, settings, settings.micro_batch_size, **adam
    )


def nothing(case: _cases.Case, settings: Settings) -> Trainer:
    """An `AccumModel` with nothing to do, on the whole batch."""
    model = AccumModel.wrap(case.model(), accum_steps=1)
    return _in_fit(model, case, settings, settings.batch_size)


def across(case: _cases.Case, settings: Settings) -> Trainer:
    """`accum_steps`, one batch per micro-batch."""
    model = AccumModel.wrap(
        case.model(), accum_steps=settings.num_micro_batches
    )
    return _in_fit(model, case, settings, settings.micro_batch_size)


def callback(case: _cases.Case, settings: Settings) -> Trainer:
    """The same on a plain model by a callback, called as `fit` calls it."""
    each = AccumCallback(settings.num_micro_batches, verbose=0)
    return _in_fit(
        case.model(),
        case,
        settings,
        settings.micro_batch_size,
        callbacks=[each],
    )


def cut(case: _cases.Case, settings: Settings) -> Trainer:
    """The batch cut inside the step."""
    model = AccumModel.wrap(
        case.model(), micro_batch_size=settings.micro_batch_size
    )
    return _in_fit(model, case, settings, settings.batch_size)


def cut_xla(case: _cases.Case, settings: Settings) -> Trainer:
    """The same, compiled with XLA."""
    return cut(case, dataclasses.replace(settings, jit_compile=True))


def cut_batch_loss(case: _cases.Case, settings: Settings) -> Trainer:
    """The batch cut inside the step, with one loss over all of it."""
    model = AccumModel.wrap(
        case.model(),
        micro_batch_size=settings.micro_batch_size,
        loss_scope="batch",
    )
    return _in_fit(model, case, settings, settings.batch_size)


COLUMNS: dict[str, Callable[[_cases.Case, Settings], Trainer]] = {
    LIMIT: limit,
    SMALL: plain_small,
    UNCUT: plain,
    BUILT_IN: built_in,
    NOTHING: nothing,
    ACROSS: across,
    CALLBACK: callback,
    CUT: cut,
    CUT_XLA: cut_xla,
    CUT_BATCH_LOSS: cut_batch_loss,
}


def _in_fit(model, case, settings, rows_per_call, callbacks=(), **adam):
    model.compile(
        _adam(**adam),
        _loss(),
        jit_compile=settings.jit_compile,
    )
    calls = keras.callbacks.CallbackList(list(callbacks), model=model)
    model.make_train_function()
    calls.on_train_begin()
    calls.on_epoch_begin(0)
    data = tf.data.Dataset.from_tensor_slices(case.data(settings.batch_size))
    data = data.batch(rows_per_call, drop_remainder=True).cache().repeat()
    iterator = iter(data)
    num_calls = settings.batch_size // rows_per_call

    def update():
        for step in range(num_calls):
            calls.on_train_batch_begin(step)
            logs = model.train_function(iterator)
            calls.on_train_batch_end(step, logs)

    return Trainer(model, update)


def _adam(**kwargs):
    # Far above rounding: Adam makes steps of the smallest gradients, and the
    # columns add theirs up in different orders.
    return keras.optimizers.Adam(epsilon=1e-5, **kwargs)


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _sum(one, other):
    if isinstance(one, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], 0),
            tf.concat([one.indices, other.indices], 0),
            one.dense_shape,
        )
    return one + other


def _divided(gradient, count):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values / count, gradient.indices, gradient.dense_shape
        )
    return gradient / count
