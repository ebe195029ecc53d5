"""Many steps in one process: nothing grows."""

import collections
import gc
import pathlib

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel

PAGE = 4096


def resident_bytes():
    gc.collect()
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * PAGE


def num_objects():
    """Variables that are alive."""
    gc.collect()
    # To ask each of some million objects what it is takes far longer.
    numbers = collections.Counter(map(type, gc.get_objects()))
    kinds = (keras.Variable, tf.Variable)
    return sum(
        number for kind, number in numbers.items() if issubclass(kind, kinds)
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path("/proc/self/statm").exists(), reason="needs /proc"
)
@pytest.mark.parametrize(
    "way, num_fits, num_epochs", [("wrap", 20, 5), ("callback", 10, 1)]
)
def test_many_steps_leave_memory_as_it_was(way, num_fits, num_epochs):
    """20,000 steps and 2,000, half of them to warm up."""
    model, traces = helpers.traced_model()
    callbacks = []
    if way == "wrap":
        model = AccumModel.wrap(model, 3)
    else:
        callbacks = [AccumCallback(3, verbose=0)]
    model.compile("adam", "mse", steps_per_execution=50)
    x, y = np.ones((400, 5)), np.ones((400, 2))
    traces.clear()
    memory, objects = [], []
    for _ in range(num_fits):
        model.fit(
            x,
            y,
            batch_size=2,
            epochs=num_epochs,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        memory.append(resident_bytes())
        objects.append(num_objects())
    # 66 updates of 3 in each epoch, and one of the 2 that are left.
    assert int(model.optimizer.iterations) == 67 * num_fits * num_epochs
    half = num_fits // 2
    assert max(memory[half:]) <= 1.02 * memory[half - 1], memory
    assert max(objects[half:]) <= objects[half - 1], objects
    assert len(traces) == 1
