"""AccumCallback: any compiled model, its logs, and leaving no trace."""

import csv

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

MAKERS = {
    "functional": helpers.functional,
    "sequential": helpers.sequential,
    "subclassed": helpers.subclassed,
}


class OwnStep(helpers.subclass_of(keras.Model)):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_step():
    model = OwnStep()
    model(np.zeros((1, 5)))
    return helpers.with_known_weights(model)


def unbuilt():
    keras.utils.set_random_seed(5)
    return helpers.subclass_of(keras.Model)()


MAKERS |= {"own_step": own_step, "unbuilt": unbuilt}


@pytest.mark.parametrize("kind", MAKERS)
def test_any_model_equals_large_batch_and_is_as_it_was(kind):
    """https://github.com/keras-team/keras/issues/16633"""
    data = helpers.rows(22)
    large = helpers.fit_large_batch("adam", 12, data, make=MAKERS[kind])
    model = MAKERS[kind]()
    model.compile("adam", "mse")
    model.make_train_function()
    before = {
        name: getattr(model, name)
        for name in ("optimizer", "train_function", "test_function", "compiled")
    }
    attributes = set(vars(model))
    model.fit(
        *data,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[AccumCallback(3, verbose=0)],
    )
    helpers.assert_close(model, large)
    for name, value in before.items():
        assert getattr(model, name) is value
    assert set(vars(model)) - attributes <= {"history", "_eval_epoch_iterator"}
    # A later plain fit is plain, and goes on where the optimizer is.
    for each in (model, large):
        each.fit(*data, batch_size=11, shuffle=False, verbose=0)
    helpers.assert_close(model, large)
    assert int(model.optimizer.iterations) == 4 + 2


FAILURES = {
    "callback": ValueError("from a callback"),
    "interrupt": KeyboardInterrupt(),
    "data": None,
    "step": None,
    "validation": None,
}


@pytest.mark.parametrize("where", FAILURES)
def test_failed_fit_leaves_the_model_as_it_was(where):
    x, y = helpers.rows(12)

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and FAILURES[where] is not None:
                raise FAILURES[where]

    def batches():
        yield x[:4], y[:4]
        yield x[4:8], y[4:8]
        if where == "data":
            raise ValueError("from the data")
        yield x[8:, :2] if where == "step" else x[8:], y[8:]

    model = helpers.functional()
    model.compile("sgd", "mse", run_eagerly=where == "step")
    optimizer = model.optimizer
    caught = None
    try:
        model.fit(
            batches(),
            shuffle=False,
            verbose=0,
            callbacks=[Fail(), AccumCallback(3, verbose=0)],
            validation_data=(x[:, :2], y) if where == "validation" else None,
        )
    except BaseException as error:
        caught = error  # Held, with all the frames its traceback holds.
    assert caught is not None
    assert model.optimizer is optimizer
    assert "train_step" not in vars(model)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    updates = 3 + (where == "validation")
    assert int(optimizer.iterations) == updates


def test_fit_after_failed_fit_starts_clean():
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise ValueError

    x, y = helpers.rows(12)
    model = helpers.functional()
    model.compile(keras.optimizers.SGD(0.125), "mse")
    ours = AccumCallback(3, verbose=0)
    with pytest.raises(ValueError):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[ours, Fail()])
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[ours])
    large = helpers.fit_large_batch(
        keras.optimizers.SGD(0.125), 12, (x, y), epochs=1
    )
    helpers.assert_close(model, large)


def test_first_line_and_logs(capsys, tmp_path):
    model = helpers.functional()
    model.compile("sgd", "mse")
    path = tmp_path / "log.csv"
    history = model.fit(
        *helpers.rows(20),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[keras.callbacks.CSVLogger(path), AccumCallback(4)],
    ).history
    assert capsys.readouterr().out == (
        "Effective batch size: 2 rows per batch x 4 accum_steps x 1 replica = "
        "8 rows per update; 3 updates per epoch.\n"
    )
    assert history["updates"] == [3, 3]
    np.testing.assert_allclose(history["effective_batch_size"], [20 / 3] * 2)
    with open(path) as file:
        logged = list(csv.DictReader(file))
    assert [row["updates"] for row in logged] == ["3", "3"]
    model.fit(
        *helpers.rows(8),
        batch_size=2,
        verbose=0,
        callbacks=[AccumCallback(4, verbose=0)],
    )
    assert capsys.readouterr().out == ""


def test_first_line_without_a_known_number_of_batches(capsys):
    x, y = helpers.rows(8)
    data = ((x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2))
    model = helpers.functional()
    model.compile("sgd", "mse")
    model.fit(data, shuffle=False, verbose=0, callbacks=[AccumCallback(2)])
    assert capsys.readouterr().out == (
        "Effective batch size: 2 rows per batch x 2 accum_steps x 1 replica = "
        "4 rows per update.\n"
    )


@pytest.mark.parametrize(
    "remainder, sizes, updates",
    [
        ("flush", [5.0, 5.0], [2, 2]),
        ("drop", [6.0, 6.0], [1, 1]),
        ("carry", [6.0, 6.0], [1, 2]),
    ],
)
@pytest.mark.parametrize("way", ["plain", "wrapped"])
def test_logged_rows_are_those_of_the_updates(way, remainder, sizes, updates):
    model = helpers.functional()
    ours = AccumCallback(3, remainder, verbose=0)
    if way == "wrapped":
        model = AccumModel.wrap(model, 3, remainder)
        ours = AccumCallback(verbose=0)
    model.compile("sgd", "mse")
    history = model.fit(
        *helpers.rows(10),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[ours],
    ).history
    assert history["effective_batch_size"] == sizes
    assert history["updates"] == updates


def test_epoch_without_an_update_logs_nan():
    model = helpers.functional()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="no update is ever made"):
        history = model.fit(
            *helpers.rows(4),
            batch_size=2,
            verbose=0,
            callbacks=[AccumCallback(3, "drop", verbose=0)],
        ).history
    assert history["updates"] == [0]
    assert np.isnan(history["effective_batch_size"]).all()


@pytest.mark.parametrize("way", ["plain", "wrapped"])
def test_schedule_of_accum_steps_costs_one_trace(way):
    """https://github.com/Lightning-AI/pytorch-lightning/pull/16729"""
    model, traces = helpers.traced_model()
    if way == "wrapped":
        model = AccumModel.wrap(model)
    model.compile("sgd", "mse")
    traces.clear()
    history = model.fit(
        *helpers.rows(12),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[AccumCallback({0: 1, 1: 3}, verbose=0)],
    ).history
    assert history["updates"] == [6, 2]
    assert history["effective_batch_size"] == [2.0, 6.0]
    assert len(traces) == 1
    if way == "wrapped":
        assert model.accum_steps == 1


def test_same_callback_again_costs_no_trace():
    model, traces = helpers.traced_model()
    model.compile("sgd", "mse")
    traces.clear()
    ours = AccumCallback(3, verbose=0)
    for _ in range(2):
        model.fit(*helpers.rows(6), batch_size=2, verbose=0, callbacks=[ours])
    assert len(traces) == 1
    model.compile("adam", "mse")
    model.fit(*helpers.rows(6), batch_size=2, verbose=0, callbacks=[ours])
    assert len(traces) == 2
    assert int(model.optimizer.iterations) == 1


def test_same_callback_serves_two_models():
    ours = AccumCallback(3, verbose=0)
    data = helpers.rows(12)
    large = helpers.fit_large_batch("sgd", 12, data, epochs=1)
    for _ in range(2):
        model = helpers.functional()
        model.compile("sgd", "mse")
        model.fit(
            *data, batch_size=4, shuffle=False, verbose=0, callbacks=[ours]
        )
        helpers.assert_close(model, large)


def test_callback_gives_its_value_to_an_accum_model_for_one_fit():
    model = helpers.subclassed(AccumModel)
    model.compile("sgd", "mse")
    model.fit(
        *helpers.rows(8),
        batch_size=2,
        verbose=0,
        callbacks=[AccumCallback(4, verbose=0)],
    )
    assert int(model.optimizer.iterations) == 1
    assert model.accum_steps == 1


def test_evaluate_and_predict_take_the_callback():
    model = helpers.functional()
    model.compile("sgd", "mse")
    optimizer = model.optimizer
    x, y = helpers.rows(4)
    ours = AccumCallback(2, verbose=0)
    model.evaluate(x, y, verbose=0, callbacks=[ours])
    model.predict(x, verbose=0, callbacks=[ours])
    assert model.optimizer is optimizer


@pytest.mark.parametrize("nesting", ["bare", "outside", "inside"])
def test_learning_rate_callbacks_reach_the_inner_optimizer(nesting):
    """https://github.com/andreped/GradientAccumulator/issues/133"""
    inner = keras.optimizers.SGD(1.0)
    optimizer = {
        "bare": lambda: AccumOptimizer(inner, 2),
        "outside": lambda: AccumOptimizer(
            keras.optimizers.LossScaleOptimizer(inner), 2
        ),
        "inside": lambda: keras.optimizers.LossScaleOptimizer(
            AccumOptimizer(inner, 2)
        ),
    }[nesting]()
    model = helpers.functional()
    model.compile(optimizer, "mse")
    x, y = helpers.rows(8)
    history = model.fit(
        x,
        np.full_like(y, 1e6),
        batch_size=2,
        epochs=3,
        verbose=0,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda e: 2.0 ** -(e + 20))
        ],
    ).history
    np.testing.assert_allclose(
        history["learning_rate"], [2.0**-20, 2.0**-21, 2.0**-22]
    )
    assert float(inner.learning_rate) == 2.0**-22
    history = model.fit(
        x,
        y,
        batch_size=2,
        epochs=3,
        verbose=0,
        callbacks=[
            AccumCallback(verbose=0),
            # Nothing counts as an improvement: halved after each epoch.
            keras.callbacks.ReduceLROnPlateau(
                "loss", 0.5, patience=0, min_delta=1e30
            ),
        ],
    ).history
    assert model.optimizer is optimizer
    assert float(inner.learning_rate) < 2.0**-22
    assert "learning_rate" in history


def test_loss_scaling_is_nested_right_only_for_the_fit():
    inner = keras.optimizers.Adam(0.01)
    accum = AccumOptimizer(inner, 2)
    outer = keras.optimizers.LossScaleOptimizer(accum)
    model = helpers.functional()
    model.compile(outer, "mse")
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(self.model.optimizer)
            seen.append(self.model.optimizer.inner_optimizer)

    model.fit(
        *helpers.rows(8),
        batch_size=2,
        verbose=0,
        callbacks=[Look(), AccumCallback(verbose=0)],
    )
    assert seen == [accum, outer]
    assert model.optimizer is outer
    assert outer.inner_optimizer is accum
    assert accum.inner_optimizer is inner
    assert int(inner.iterations) == 2


def test_tensorboard_counts_updates(tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/835"""
    model = helpers.functional()
    model.compile("sgd", "mse")
    steps = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(int(self.model.optimizer.iterations))

    model.fit(
        *helpers.rows(20),
        batch_size=2,
        verbose=0,
        callbacks=[
            Look(),
            AccumCallback(4, "carry", verbose=0),
            keras.callbacks.TensorBoard(tmp_path, update_freq=1),
        ],
    )
    assert steps == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert list(tmp_path.rglob("events*"))


def test_tensorboard_shows_what_is_logged(tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/1923"""
    model = helpers.functional()
    model.compile("sgd", "mse")
    history = model.fit(
        *helpers.rows(16),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.TensorBoard(tmp_path),
            AccumCallback(4, noise_scale=True, verbose=0),
        ],
    ).history
    seen = {}
    for path in sorted((tmp_path / "train").glob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag.startswith("epoch_"):
                    number = float(tf.make_ndarray(value.tensor))
                    seen.setdefault(value.tag, {})[event.step] = number
    assert history["updates"] == [2, 2]
    for name in (
        "effective_batch_size",
        "updates",
        "gradient_norm",
        "gradient_noise_scale",
    ):
        shown = seen[f"epoch_{name}"]
        assert list(shown) == [0, 1]
        # Event files hold float32.
        np.testing.assert_allclose(
            list(shown.values()), history[name], rtol=1e-6
        )


def test_own_train_step_that_ignores_the_optimizer_is_an_error():
    class Elsewhere(helpers.subclass_of(keras.Model)):
        def train_step(self, data):
            return {"loss": tf.constant(0.0)}

    model = Elsewhere()
    model(np.zeros((1, 5)))
    model.compile("sgd", "mse")
    optimizer = model.optimizer
    with pytest.raises(RuntimeError, match="Nothing accumulates because"):
        model.fit(
            *helpers.rows(8),
            batch_size=2,
            verbose=0,
            callbacks=[AccumCallback(2, verbose=0)],
        )
    assert model.optimizer is optimizer


def test_callback_driven_by_hand():
    """A hand-written loop, with the hooks called in Keras's order."""
    x, y = helpers.rows(12)
    model = helpers.functional()
    model.compile("sgd", "mse")
    callbacks = keras.callbacks.CallbackList(
        [AccumCallback(3, verbose=0)], model=model, epochs=1, steps=3, verbose=0
    )
    model.make_train_function()
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for begin in (0, 4, 8):
        model.train_on_batch(x[begin : begin + 4], y[begin : begin + 4])
    callbacks.on_epoch_end(0, {})
    callbacks.on_train_end()
    large = helpers.fit_large_batch("sgd", 12, (x, y), epochs=1)
    helpers.assert_close(model, large)


def test_model_saved_during_fit_keeps_the_partial_cycle(tmp_path):
    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                self.model.save(tmp_path / "mid.keras")

    x, y = helpers.rows(12)
    model = helpers.functional()
    model.compile(keras.optimizers.Adam(0.125), "mse")
    model.fit(
        x,
        y,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[AccumCallback(3, verbose=0), Save()],
    )
    model.save(tmp_path / "after.keras")
    loaded = keras.models.load_model(tmp_path / "mid.keras")
    assert type(loaded.optimizer) is AccumOptimizer
    assert loaded.optimizer.cycle_position == 1
    loaded.fit(
        x[8:],
        y[8:],
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[AccumCallback(3, verbose=0)],
    )
    helpers.assert_equal(helpers.weights(loaded), helpers.weights(model))
    after = keras.models.load_model(tmp_path / "after.keras")
    assert type(after.optimizer) is keras.optimizers.Adam


def test_two_callbacks_are_refused():
    model = helpers.functional()
    model.compile("sgd", "mse")
    optimizer = model.optimizer
    twice = [AccumCallback(2), AccumCallback(2)]
    with pytest.raises(ValueError, match="one `AccumCallback` only"):
        model.fit(*helpers.rows(4), verbose=0, callbacks=twice)
    assert model.optimizer is optimizer
    model = AccumModel.wrap(helpers.functional(), 2)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="one `AccumCallback` only"):
        model.fit(*helpers.rows(4), verbose=0, callbacks=twice)


def test_same_callback_follows_an_exchanged_optimizer():
    ours = AccumCallback(2, verbose=0)
    data = helpers.rows(8)
    model = helpers.functional()
    model.compile("adam", "mse")
    model.fit(*data, batch_size=2, verbose=0, callbacks=[ours])
    before = helpers.weights(model)
    model.optimizer = keras.optimizers.SGD(0.0)
    model.make_train_function(force=True)
    model.fit(*data, batch_size=2, verbose=0, callbacks=[ours])
    helpers.assert_equal(helpers.weights(model), before)
    assert int(model.optimizer.iterations) == 2


def test_optimizer_that_was_compiled_without_buffers_can_accumulate():
    model = helpers.functional()
    optimizer = AccumOptimizer("sgd", 1)
    model.compile(optimizer, "mse")
    data = helpers.rows(8)
    model.fit(*data, batch_size=2, verbose=0)
    model.fit(
        *data, batch_size=2, verbose=0, callbacks=[AccumCallback(4, verbose=0)]
    )
    assert int(optimizer.iterations) == 4 + 1
    assert optimizer.accum_steps == 1
    model.fit(*data, batch_size=2, verbose=0)
    assert int(optimizer.iterations) == 4 + 1 + 4
