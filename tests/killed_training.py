"""Training that is killed over and over, run by `test_kills.py`.

TensorFlow is imported once; each attempt is a fork of this process, made
before any operation has run. An attempt kills itself with SIGKILL, which no
handler sees, at a moment of the plan, and the next one goes on from what is on
the disk.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import accum_model

NUM_BATCHES = 60
BATCHES_PER_EPOCH = 5
ACCUM_STEPS = 3  # Epochs end in mid-cycle.


class Moments:
    """Counts what happens, and kills the process at one moment."""

    def __init__(self, kind, number):
        self._kind, self._number = kind, number

    def reached(self, kind):
        if kind == self._kind:
            self._number -= 1
            if self._number == 0:
                os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = Moments(None, 0)


@keras.saving.register_keras_serializable(package="killed_training")
class Dense(keras.layers.Dense):
    """Its weights are written when a part of the file has been."""

    def save_own_variables(self, store):
        super().save_own_variables(store)
        MOMENTS.reached("in save")


class Kill(keras.callbacks.Callback):
    """The moments that callbacks see; `name` tells several apart."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def on_train_batch_end(self, batch, logs=None):
        MOMENTS.reached(f"batch {self.name}")

    def on_epoch_end(self, epoch, logs=None):
        MOMENTS.reached(f"epoch end {self.name}")


class SaveThenRename(keras.callbacks.Callback):
    """Writes a file next to the last one, and puts it in its place."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch, logs=None):
        if batch % 2:
            new = self.path.with_name("new.keras")
            self.model.save(new)
            MOMENTS.reached("before rename")
            os.replace(new, self.path)


def new_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((5,)), Dense(7, "tanh"), keras.layers.Dense(2)]
    )


def data():
    rng = np.random.default_rng(0)
    rows = 2 * NUM_BATCHES
    x, y = rng.normal(size=(rows, 5)), rng.normal(size=(rows, 2))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)


def train_wrapped(folder):
    """Goes on in the middle of an epoch: the file knows the batch."""
    path = folder / "model.keras"
    if path.exists():
        model = keras.models.load_model(path)
        model.run_eagerly = True
    else:
        model = accum_model.AccumModel.wrap(new_model(), ACCUM_STEPS, "carry")
        model.compile(keras.optimizers.Adam(0.125), "mse", run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
    seen = model.optimizer.num_micro_batches
    model.fit(
        data().skip(seen),
        verbose=0,
        callbacks=[Kill("before"), SaveThenRename(path), Kill("after")],
    )
    return [*model.weights, *model.optimizer.variables]


def train_with_callback(folder):
    """Goes on at the start of an epoch, in the middle of a cycle."""
    model = new_model()
    model.compile(keras.optimizers.Adam(0.125), "mse", run_eagerly=True)
    model.fit(
        data().take(BATCHES_PER_EPOCH),
        epochs=NUM_BATCHES // BATCHES_PER_EPOCH,
        verbose=0,
        callbacks=[
            accum_model.AccumCallback(ACCUM_STEPS, "carry", verbose=0),
            Kill("before"),
            keras.callbacks.BackupAndRestore(
                folder / "backup", double_checkpoint=True
            ),
            Kill("after"),
        ],
    )
    return [*model.weights, *model.optimizer.variables]


WAYS = {"wrap": train_wrapped, "callback": train_with_callback}


def attempt(way, folder, moment):
    """Trains in a fork; True when it was killed, False when it has ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            global MOMENTS
            MOMENTS = Moments(*moment)
            variables = WAYS[way](folder)
            np.savez(folder / "end.npz", *[v.numpy() for v in variables])
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"An attempt failed: {way} {moment}.")
    return False


def end_of(folder):
    with np.load(folder / "end.npz") as stored:
        return [stored[name] for name in stored]


def moments_of(way, num_kills):
    """A seeded plan. The first backup of all is let through.

    Keras keeps a second backup from the second one on; a file that is renamed
    when it is complete needs no such care.
    """
    rng = np.random.default_rng(1)
    kinds = {
        "wrap": ["batch before", "batch after", "in save", "before rename"],
        "callback": [
            "batch before",
            "epoch end before",
            "epoch end after",
            "in save",
        ],
    }[way]
    # Few enough for training not to end before the last of them.
    latest = {"wrap": 5, "callback": 2}[way]
    plan = [
        (kinds[number % 4], int(rng.integers(1, latest + 1)))
        for number in range(num_kills)
    ]
    if way == "callback":
        plan[0] = ("epoch end after", 1)
    return plan


def main(folder, num_kills):
    results = {}
    for way in WAYS:
        whole, broken = folder / way / "whole", folder / way / "broken"
        for each in (whole, broken):
            each.mkdir(parents=True)
        assert not attempt(way, whole, (None, 0))
        plan = moments_of(way, num_kills)
        kills = sum(attempt(way, broken, moment) for moment in plan)
        assert not attempt(way, broken, (None, 0))
        equal = [
            np.array_equal(one, other)
            for one, other in zip(end_of(whole), end_of(broken), strict=True)
        ]
        results[way] = {"kills": kills, "equal": all(equal)}
    print(json.dumps(results))


if __name__ == "__main__":
    keras.config.set_floatx("float64")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
