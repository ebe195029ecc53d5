"""Interrupted in mid-cycle and gone on with, by every way in and every file.

The model that goes on is at each later batch, bit for bit, where the one that
was never interrupted is: weights, slots, buffers and counters.
"""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

WAYS = ("wrap", "subclass", "callback", "optimizer")
X, Y = helpers.rows(16)  # 8 batches of 2.


def make(way, accum_steps=3):
    """A compiled model, and the callbacks that make it accumulate."""
    callbacks = []
    optimizer = keras.optimizers.Adam(0.125)
    if way == "wrap":
        model = AccumModel.wrap(helpers.functional(), accum_steps, "carry")
    elif way == "subclass":
        model = helpers.subclassed(
            AccumModel, accum_steps=accum_steps, remainder="carry"
        )
    else:
        model = helpers.functional()
    if way == "callback":
        callbacks = [AccumCallback(accum_steps, "carry", verbose=0)]
    if way == "optimizer":
        optimizer = AccumOptimizer(optimizer, accum_steps)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model, callbacks


def state(model):
    """All that training goes on from."""
    optimizer = model.optimizer
    counters = [
        optimizer.accum_steps,
        optimizer.cycle_position,
        optimizer.num_micro_batches,
    ]
    variables = [*model.weights, *optimizer.variables]
    return [*counters, *helpers.values(variables)]


class Recorder(keras.callbacks.Callback):
    """Notes the state after each batch; saves it once, and restores it."""

    def __init__(self, save=None, save_after=None, restore=None):
        super().__init__()
        self.states = []
        self.save, self.save_after, self.restore = save, save_after, restore

    def on_train_begin(self, logs=None):
        if self.restore is not None:
            self.restore(self.model)
            self.restored = state(self.model)

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(state(self.model))
        if len(self.states) == self.save_after:
            self.save(self.model)


def fit(model, callbacks, first_row=0, **kwargs):
    model.fit(
        X[first_row:],
        Y[first_row:],
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **kwargs,
    )


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


SAVE = {
    "keras": lambda path: lambda model: model.save(f"{path}.keras"),
    "weights": lambda path: (
        lambda model: model.save_weights(f"{path}.weights.h5")
    ),
    "checkpoint": lambda path: lambda model: checkpoint(model).write(str(path)),
}
RESTORE = {
    "keras": lambda path: None,
    "weights": lambda path: (
        lambda model: model.load_weights(f"{path}.weights.h5")
    ),
    "checkpoint": lambda path: (
        lambda model: checkpoint(model).read(str(path)).assert_consumed()
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SAVE)
def test_every_batch_after_a_resume_is_bit_equal(way, kind, tmp_path):
    """https://github.com/huggingface/transformers/issues/22143"""
    path = tmp_path / "saved"
    model, callbacks = make(way)
    whole = Recorder(SAVE[kind](path), save_after=4)
    fit(model, [*callbacks, whole])
    resumed, callbacks = make(way)
    if kind == "keras":
        net = {"Net": helpers.subclass_of(AccumModel)}
        resumed = keras.models.load_model(
            tmp_path / "saved.keras", custom_objects=net
        )
        resumed.run_eagerly = True
    elif way == "optimizer":
        resumed.optimizer.build(resumed.trainable_variables)
    rest = Recorder(restore=RESTORE[kind](path))
    fit(resumed, [*callbacks, rest], first_row=8)
    if kind != "keras":
        helpers.assert_equal(rest.restored, whole.states[3])
        assert rest.restored[:3] == [3, 1, 4]
    assert len(rest.states) == 4
    for ours, theirs in zip(rest.states, whole.states[4:], strict=True):
        helpers.assert_equal(ours, theirs)
    assert ours[:3] == [3, 2, 8]


@pytest.mark.parametrize("kind", ["keras", "weights"])
def test_schedule_goes_on_where_it_was(kind, tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/pull/16729

    2 batches per update in the first epoch, 3 in the second; saved in the
    second, after 4 of its 8 batches.
    """
    path = tmp_path / "saved"
    model, callbacks = make("callback", {0: 2, 1: 3})
    whole = Recorder(SAVE[kind](path), save_after=12)
    fit(model, [*callbacks, whole], epochs=2)
    resumed, callbacks = make("callback", {0: 2, 1: 3})
    if kind == "keras":
        resumed = keras.models.load_model(tmp_path / "saved.keras")
        resumed.run_eagerly = True
    rest = Recorder(restore=RESTORE[kind](path))
    fit(
        resumed,
        [*callbacks, rest],
        first_row=8,
        initial_epoch=1,
        epochs=2,
    )
    for ours, theirs in zip(rest.states, whole.states[12:], strict=True):
        helpers.assert_equal(ours, theirs)
    assert ours[:3] == [3, 2, 16]


class Crash(keras.callbacks.Callback):
    """Ends training in the middle of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.is_reached = epoch == self.epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.is_reached and batch == 2:
            raise RuntimeError("crash")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("double", [False, True])
def test_backup_and_restore_is_bit_equal(way, double, tmp_path):
    """8 batches per epoch: both backups are of the middle of a cycle."""
    model, callbacks = make(way)
    whole = Recorder()
    fit(model, [*callbacks, whole], epochs=3)

    def backup():
        return keras.callbacks.BackupAndRestore(
            tmp_path / "backup", double_checkpoint=double
        )

    broken, callbacks = make(way)
    with pytest.raises(RuntimeError, match="crash"):
        fit(broken, [*callbacks, backup(), Crash(2)], epochs=3)
    if double:
        # As if the crash had come while the last backup was written.
        latest = tmp_path / "backup" / "latest.weights.h5"
        latest.write_bytes(latest.read_bytes()[:100])
    resumed, callbacks = make(way)
    rest = Recorder()
    fit(resumed, [*callbacks, backup(), rest], epochs=3)
    assert len(rest.states) == (16 if double else 8)
    for ours, theirs in zip(
        reversed(rest.states), reversed(whole.states), strict=False
    ):
        helpers.assert_equal(ours, theirs)


def test_saved_state_says_which_batch_comes_next(tmp_path):
    """https://github.com/huggingface/transformers/pull/8624

    Batches, not updates: 6 of 12 were seen, with 4 batches per update.
    """
    numbers = np.arange(12.0)
    batches = tf.data.Dataset.from_tensor_slices(
        (np.repeat(numbers[:, None], 5, 1), np.zeros((12, 2)))
    ).batch(1)
    model = AccumModel.wrap(helpers.functional(), 4, "carry")
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(batches.take(6), shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    assert resumed.optimizer.num_micro_batches == 6
    assert int(resumed.optimizer.iterations) == 1
    rest = batches.skip(resumed.optimizer.num_micro_batches)
    seen = [float(x[0, 0]) for x, _ in rest]
    assert seen == list(range(6, 12))
    for each in (model, resumed):
        each.fit(rest, shuffle=False, verbose=0)
    helpers.assert_equal(state(resumed), state(model))
    assert int(resumed.optimizer.iterations) == 3


def test_discarded_cycle_divides_by_fresh_batches_only(tmp_path):
    """https://github.com/the-database/traiNNer-redux/pull/96"""
    model, _ = make("wrap", 4)
    fit(model, [], first_row=4)  # 6 batches: one update, 2 are left.
    model.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    resumed.run_eagerly = True
    resumed.reset_accumulation()
    assert resumed.optimizer.cycle_position == 0
    plain = helpers.functional()
    plain.set_weights(resumed.get_weights())
    plain.compile(keras.optimizers.Adam(0.125), "mse", run_eagerly=True)
    plain.optimizer.build(plain.trainable_variables)
    inner = resumed.optimizer.inner_optimizer
    for variable, value in zip(
        plain.optimizer.variables, inner.variables, strict=True
    ):
        variable.assign(value)
    plain.train_on_batch(X[:8], Y[:8])
    resumed.fit(X[:8], Y[:8], batch_size=2, shuffle=False, verbose=0)
    helpers.assert_close(resumed, plain)
    assert resumed.optimizer.cycle_position == 0
