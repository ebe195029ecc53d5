"""`micro_batch_size="auto"`: from the whole batch down, until it fits.

A step changes nothing before all of it is computed, so one that ran out of
memory is simply done again on the same batch.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from accum_model import batch_statistics
from accum_model import data_rows
from accum_model.cut import cut_checks
from accum_model.cut.cutting import Cutting

TrainFunction = Callable[[Iterator[Any]], Any]


def retrying(
    cutting: Cutting,
    compile_step: Callable[[], TrainFunction],
    model: keras.Model,
) -> TrainFunction:
    """Returns a train function that halves the size when memory runs out.

    Args:
        cutting: Holds the size.
        compile_step: Compiles Keras's train function for the present size.
        model: The model to be trained.
    """
    step = compile_step()

    def train_on(data):
        nonlocal step
        num_rows = int(data_rows.num_rows(data))
        while True:
            num_commits = cutting.num_commits
            try:
                # Any iterator will do for Keras. One of a data set would have
                # lost the batch by now.
                logs = step(iter([data]))
            except tf.errors.ResourceExhaustedError as error:
                if cutting.num_commits > num_commits:
                    raise cut_checks.update_does_not_fit(num_rows) from error
                cutting.halve(num_rows, error)
                if model.jit_compile:
                    step = compile_step()
            else:
                cutting.note_fit(num_rows)
                if cutting.size is not None:
                    batch_statistics.warn_once(
                        model, f"micro_batch_size={cutting.size}"
                    )
                return logs

    def train_function(iterator):
        logs = train_on(next(iterator))
        for _ in range(model.steps_per_execution - 1):
            try:
                data = next(iterator)
            except StopIteration:
                break
            logs = train_on(data)
        return logs

    return train_function
