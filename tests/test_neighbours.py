"""Keras's other parts around accumulation: callbacks, data, models.

They see what they see when plain Keras trains on the large batch.
"""

import csv

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

WAYS = ("wrap", "subclass", "callback", "optimizer")
K = 3


def accumulating(way, make, optimizer, accum_steps=K, **kwargs):
    """A compiled model that `make` makes, and the callbacks of its fits."""
    callbacks = []
    if way == "wrap":
        model = AccumModel.wrap(make(), accum_steps)
    elif way == "subclass":
        # Made of the tensors of the model, where there are some.
        inner = make()
        model = AccumModel(inner.input, inner.output, accum_steps=accum_steps)
    else:
        model = make()
    if way == "callback":
        callbacks = [AccumCallback(accum_steps, verbose=0)]
    if way == "optimizer":
        optimizer = AccumOptimizer(optimizer, accum_steps)
    model.compile(optimizer, run_eagerly=True, **kwargs)
    return model, callbacks


def compiled(make, optimizer, **kwargs):
    model = make()
    model.compile(optimizer, run_eagerly=True, **kwargs)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_callbacks_see_the_run_of_the_large_batch(way, tmp_path):
    x, y = helpers.rows(12)

    def neighbours(folder):
        folder.mkdir()
        return [
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: 0.5 if epoch == 1 else rate
            ),
            # Nothing counts as an improvement: halved after each epoch.
            keras.callbacks.ReduceLROnPlateau("loss", 0.5, 0, min_delta=1e30),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(
                folder / "{epoch}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.ModelCheckpoint(
                folder / "best.weights.h5",
                "val_loss",
                save_best_only=True,
                save_weights_only=True,
            ),
            keras.callbacks.BackupAndRestore(folder / "backup"),
            keras.callbacks.EarlyStopping(
                "val_loss", patience=3, restore_best_weights=True
            ),
        ]

    def fit(model, batch_size, callbacks):
        return model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=12,
            shuffle=False,
            verbose=0,
            validation_data=(x[:4], -y[:4]),
            callbacks=callbacks,
        ).history

    plain = compiled(
        helpers.functional, keras.optimizers.SGD(0.25, 0.5), loss="mse"
    )
    expected = fit(plain, 12, neighbours(tmp_path / "plain"))
    model, ours = accumulating(
        way, helpers.functional, keras.optimizers.SGD(0.25, 0.5), loss="mse"
    )
    if way == "subclass":
        helpers.with_known_weights(model)
    logs = fit(model, 4, [*neighbours(tmp_path / "ours"), *ours])
    assert 3 < len(expected["loss"]) < 12  # It stopped early.
    assert len(set(expected["learning_rate"])) > 2
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=0, atol=1e-10)
    helpers.assert_close(model, plain)
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert names == {path.name for path in (tmp_path / "ours").iterdir()}
    for name in names - {"log.csv"}:
        ours, theirs = helpers.functional(), helpers.functional()
        ours.load_weights(tmp_path / "ours" / name)
        theirs.load_weights(tmp_path / "plain" / name)
        helpers.assert_close(ours, theirs)
    rows = []
    for each in ("ours", "plain"):
        with open(tmp_path / each / "log.csv") as file:
            rows.append(list(csv.DictReader(file)))
    assert len(rows[0]) == len(rows[1])
    assert set(rows[1][0]) <= set(rows[0][0])


@pytest.mark.parametrize("way", WAYS)
def test_nan_ends_training_and_the_model_is_usable(way):
    x, y = helpers.rows(16)
    x[6:8] = np.nan
    model, callbacks = accumulating(
        way, helpers.functional, keras.optimizers.SGD(0.125), loss="mse"
    )
    if way == "subclass":
        helpers.with_known_weights(model)
    recorder = helpers.UpdateRecorder()
    model.fit(
        x,
        y,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.TerminateOnNaN(),
            recorder,
            *callbacks,
        ],
    )
    assert recorder.num_batches == 4
    if way == "optimizer":
        model.optimizer.reset()  # It knows no end of an epoch.
        assert all(np.isfinite(w).all() for w in helpers.weights(model))


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize(
    "save_freq, positions", [(3, [3, 2, 1, 0]), (4, [0, 0, 0]), (8, [0])]
)
def test_checkpoint_cadence_counts_batches(way, save_freq, positions, tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/17207

    A multiple of `accum_steps` is the way to save after updates only.
    """

    class Position(keras.callbacks.ModelCheckpoint):
        seen = []

        def _save_model(self, *args, **kwargs):
            self.seen.append(self.model.optimizer.cycle_position)
            super()._save_model(*args, **kwargs)

    Position.seen = []
    model, callbacks = accumulating(
        way, helpers.functional, "sgd", 4, loss="mse"
    )
    model.fit(
        *helpers.rows(24),
        batch_size=2,
        verbose=0,
        callbacks=[
            *callbacks,
            Position(
                tmp_path / "{batch}.weights.h5",
                save_weights_only=True,
                save_freq=save_freq,
            ),
        ],
    )
    assert Position.seen == positions


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("source", ["workers", "dataset", "numpy"])
def test_sources_of_data_give_the_same_updates(way, source):
    x, y = helpers.rows(20)
    data = {
        "workers": lambda: Batches(x, y, workers=2, max_queue_size=3),
        "dataset": lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
        "numpy": lambda: x,
    }[source]()
    options = {"y": y, "batch_size": 4} if source == "numpy" else {}
    model, callbacks = accumulating(
        way, helpers.functional, keras.optimizers.Adam(0.125), loss="mse"
    )
    model.fit(
        data,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **options,
    )
    plain = compiled(
        helpers.functional, keras.optimizers.Adam(0.125), loss="mse"
    )
    for _ in range(2):
        plain.train_on_batch(x[:12], y[:12])
        plain.train_on_batch(x[12:], y[12:])
    helpers.assert_close(model, plain)


@pytest.mark.parametrize("way", WAYS)
def test_sklearn_classifier_equals_large_batch(way):
    # Keras 3.8 relies on somebody having imported it.
    pytest.importorskip("sklearn.utils.multiclass")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 5)), rng.integers(0, 2, 24)
    options = {"loss": "categorical_crossentropy"}
    ours = []

    def make():
        inputs = keras.Input((5,))
        outputs = keras.layers.Dense(2, activation="softmax")(inputs)
        return helpers.with_known_weights(keras.Model(inputs, outputs))

    def build(X, y):
        model, callbacks = accumulating(way, make, "adam", **options)
        ours[:] = callbacks
        if way == "subclass":
            helpers.with_known_weights(model)
        return model

    def classifier(model, batch_size, callbacks):
        kwargs = {"batch_size": batch_size, "epochs": 4, "shuffle": False}
        kwargs |= {"verbose": 0, "callbacks": callbacks}
        return keras.wrappers.SKLearnClassifier(model, fit_kwargs=kwargs)

    plain = classifier(lambda X, y: compiled(make, "adam", **options), 12, [])
    plain.fit(x, y)
    callbacks = [AccumCallback(K, verbose=0)] if way == "callback" else []
    model = classifier(build, 4, callbacks).fit(x, y)
    helpers.assert_close(model.model_, plain.model_)
    np.testing.assert_array_equal(model.predict(x), plain.predict(x))


def assert_equals_large_batch(way, make, optimizer, x, y):
    """Two updates of three batches, against two large ones."""
    large = compiled(make, optimizer(), loss="mse")
    model, callbacks = accumulating(way, make, optimizer(), loss="mse")
    model.set_weights(large.get_weights())
    large.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    model.fit(
        x,
        y,
        batch_size=2,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    helpers.assert_close(model, large)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_network_of_applications_equals_large_batch(way):
    def make():
        model = keras.applications.MobileNet(
            (32, 32, 3), alpha=0.25, dropout=0.0, weights=None, classes=3
        )
        for layer in model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.trainable = False  # Of large batches it knows nothing.
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 32, 32, 3)), rng.uniform(size=(6, 3))
    assert_equals_large_batch(
        way, make, lambda: keras.optimizers.SGD(0.125, 0.5), x, y
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_transformer_backbone_equals_large_batch(way):
    keras_hub = pytest.importorskip("keras_hub")

    def make():
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=50,
            num_layers=2,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
            dropout=0.0,
            max_sequence_length=6,
        )
        pooled = backbone.output["pooled_output"]
        return keras.Model(backbone.inputs, keras.layers.Dense(2)(pooled))

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (6, 6))
    names = [each.name for each in make().inputs]
    values = {
        "token_ids": ids,
        "segment_ids": ids % 2,
        "padding_mask": np.arange(6) < rng.integers(2, 7, (6, 1)),
    }
    x = [values[name].astype("int32") for name in names]
    assert_equals_large_batch(
        way,
        make,
        lambda: keras.optimizers.SGD(0.125, 0.5),
        x,
        rng.normal(size=(6, 2)),
    )
