"""What does a batch cost that is cut into micro-batches inside the step?

One update with Adam on 64 rows, 8 rows at a time, by each of the ways there
are, and by what all of them are measured against: the bare forward and backward
passes, compiled, whose gradients are summed, and one update, compiled. Steps
run as in `fit`: Keras's own train function on an iterator of a data set.

    python -m benchmarks.step_time
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from accum_model import AccumModel
from benchmarks import _cases
from benchmarks import _timing

LIMIT = "limit"
BUILT_IN = "Keras's built-in accumulation"
UNCUT = "plain Keras, uncut"
CUT = "accum_model, cut"
CUT_BATCH_LOSS = "accum_model, cut, batch loss"

# Distance that float32 may put between the weights of two columns in their
# first updates, as a part of the way they have come. Adam enlarges the rounding
# of small gradients, and later ones drift apart.
CHECKED_UPDATES = 2
MAX_DISTANCE = 1e-4


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
    jit_compile: bool

    @property
    def num_micro_batches(self) -> int:
        """Forward and backward passes per update."""
        return self.batch_size // self.micro_batch_size


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model and a way to train it.

    Attributes:
        model: The model.
        update: Trains it on one batch, with one update.
    """

    model: keras.Model
    update: Callable[[], object]


def limit(case: _cases.Case, settings: Settings) -> Trainer:
    """Nothing but the passes, the sum of their gradients and the update.

    Micro-batches lie ready, and sparse gradients stay sparse until the update.
    """
    model, optimizer, loss = case.model(), keras.optimizers.Adam(), _loss()
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


def uncut(case: _cases.Case, settings: Settings) -> Trainer:
    """Plain Keras on the whole batch."""
    return _in_fit(case.model(), case, settings, settings.batch_size)


def built_in(case: _cases.Case, settings: Settings) -> Trainer:
    """Keras's `gradient_accumulation_steps`, one batch per micro-batch."""
    return _in_fit(
        case.model(),
        case,
        settings,
        settings.micro_batch_size,
        gradient_accumulation_steps=settings.num_micro_batches,
    )


def cut(case: _cases.Case, settings: Settings) -> Trainer:
    """The batch cut inside the step."""
    model = AccumModel.wrap(
        case.model(), micro_batch_size=settings.micro_batch_size
    )
    return _in_fit(model, case, settings, settings.batch_size)


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
    UNCUT: uncut,
    BUILT_IN: built_in,
    CUT: cut,
    CUT_BATCH_LOSS: cut_batch_loss,
}


def _in_fit(model, case, settings, rows_per_call, **adam):
    model.compile(
        keras.optimizers.Adam(**adam),
        _loss(),
        jit_compile=settings.jit_compile,
    )
    model.make_train_function()
    data = tf.data.Dataset.from_tensor_slices(case.data(settings.batch_size))
    data = data.batch(rows_per_call, drop_remainder=True).cache().repeat()
    iterator = iter(data)
    num_calls = settings.batch_size // rows_per_call

    def update():
        for _ in range(num_calls):
            model.train_function(iterator)

    return Trainer(model, update)


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


def check_same_weights(case: _cases.Case, trainers: dict[str, Trainer]) -> None:
    """Refuses to go on if the columns have trained to different weights.

    Raises:
        RuntimeError: If so.
    """
    first = _flat(case.model())
    last = {name: _flat(trainer.model) for name, trainer in trainers.items()}
    length = np.linalg.norm(last[UNCUT] - first)
    for name, weights in last.items():
        distance = np.linalg.norm(weights - last[UNCUT]) / length
        if not distance < MAX_DISTANCE:
            raise RuntimeError(
                f"{name!r} has trained to other weights than {UNCUT!r}, off by "
                f"{distance:.1e} of the way from the initial ones."
            )


def _flat(model):
    return np.concatenate(
        [np.ravel(v.numpy()) for v in model.trainable_variables]
    )


def first_call(column, case: _cases.Case, settings: Settings) -> float:
    """Seconds of the first update of a new model: tracing, and one step."""
    trainer = column(case, settings)
    begin = time.perf_counter()
    trainer.update()
    seconds = time.perf_counter() - begin
    del trainer
    gc.collect()
    return seconds


def _print_updates(name, case, settings, rounds):
    trainers = {
        column: make(case, settings) for column, make in COLUMNS.items()
    }
    for trainer in trainers.values():
        for _ in range(CHECKED_UPDATES):
            trainer.update()
    check_same_weights(case, trainers)
    seconds = _timing.interleaved(
        {column: trainer.update for column, trainer in trainers.items()},
        rounds,
    )
    medians = {
        column: statistics.median(values) for column, values in seconds.items()
    }
    print(f"\n{name:32}{'us/row':>9}{'/limit':>9}{'/built-in':>11}")
    for column, median in medians.items():
        print(
            f"  {column:30}{1e6 * median / settings.batch_size:9.1f}"
            f"{median / medians[LIMIT]:9.2f}{median / medians[BUILT_IN]:11.2f}",
            flush=True,
        )


def _print_first_calls(name, case, settings, rounds):
    columns = [UNCUT, CUT, CUT_BATCH_LOSS]
    seconds = {column: [] for column in columns}
    for _ in range(rounds):
        for column, values in seconds.items():
            values.append(first_call(COLUMNS[column], case, settings))
    medians = {
        column: statistics.median(values) for column, values in seconds.items()
    }
    print(f"\n{name + ', first call':32}{'ms':>9}{'/plain':>9}")
    for column, median in medians.items():
        print(
            f"  {column:30}{1e3 * median:9.0f}{median / medians[UNCUT]:9.2f}",
            flush=True,
        )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(_cases.CASES))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--first-calls", type=int, default=3)
    options = parser.parse_args()
    if options.batch_size % options.micro_batch_size:
        parser.error("--batch-size must be a multiple of --micro-batch-size")
    settings = Settings(
        options.batch_size, options.micro_batch_size, options.jit_compile
    )
    _timing.print_versions()
    print(
        f"batch {settings.batch_size}, micro-batches of "
        f"{settings.micro_batch_size}, jit_compile={settings.jit_compile}, "
        f"medians of {options.rounds} rounds in turns"
    )
    for name in options.models:
        case = _cases.CASES[name]
        _print_updates(name, case, settings, options.rounds)
        if options.first_calls:
            _print_first_calls(name, case, settings, options.first_calls)


if __name__ == "__main__":
    main()
