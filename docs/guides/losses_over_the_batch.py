"""Contrastive training on batches of 512 rows, 32 of them in memory.

A small encoder of scikit-learn's digits is trained with the NT-Xent loss in
three ways: on the uncut batch; on the batch cut into micro-batches with
``loss_scope="batch"``; and with gradients accumulated over small batches, where
no row meets one of another batch. It prints what the three come to, and fails
unless the first two are equal.

Run it with ``python docs/guides/losses_over_the_batch.py``, which takes less
than a minute on two cores, or with ``--runs 5`` to see how much is chance.
"""

import argparse
import dataclasses

import keras
import numpy as np
import sklearn.linear_model
import sklearn.neighbors
import tensorflow as tf
from keras import ops

from accum_model import AccumModel
from accum_model.demo import digits

ROWS = 512
MICRO_BATCH_ROWS = 32
TEMPERATURE = 0.1
EPOCHS = 15
LABELS_PER_DIGIT = 5

# float64 rounds at 1e-16. A run of 45 updates by Adam, each of which passes on
# the differences of the one before, has 1e-10 to spare for that.
TOLERANCE = 1e-10

UNCUT, CUT, ACCUMULATED = "uncut", 'loss_scope="batch"', "accum_steps=16"


def nt_xent(y_true, y_pred):
    """How surprising each view's partner is among all views of the batch.

    Args:
        y_true: Not used. The partner is the target.
        y_pred: Unit vectors, shape (rows, 2, dim): two views of each row.

    Returns:
        Cross-entropies of shape (rows,), the mean of both views.
    """
    rows = ops.shape(y_pred)[0]
    views = ops.concatenate([y_pred[:, 0], y_pred[:, 1]])
    similarity = ops.matmul(views, ops.transpose(views)) / TEMPERATURE
    index = ops.arange(2 * rows)
    is_itself = ops.equal(index[:, None], index[None, :])
    similarity = ops.where(is_itself, -1e9, similarity)
    losses = ops.sparse_categorical_crossentropy(
        ops.roll(index, rows), similarity, from_logits=True
    )
    return ops.mean(ops.reshape(losses, (2, rows)), axis=0)


def make_models():
    """Makes the encoder, and a model that projects two views with it."""
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32),
        ]
    )
    head = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(16),
            keras.layers.UnitNormalization(),
        ]
    )
    first, second = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    pair = ops.stack([head(encoder(first)), head(encoder(second))], axis=1)
    return encoder, keras.Model([first, second], pair)


def wrap(way, model):
    """Returns the model to train in one of the three ways."""
    if way == CUT:
        return AccumModel.wrap(
            model, micro_batch_size=MICRO_BATCH_ROWS, loss_scope="batch"
        )
    if way == ACCUMULATED:
        return AccumModel.wrap(model, accum_steps=ROWS // MICRO_BATCH_ROWS)
    return model


def batch_size(way):
    """Rows of what `fit` calls a batch. An update has 512 rows in any way."""
    return MICRO_BATCH_ROWS if way == ACCUMULATED else ROWS


def two_views(images, rng):
    """Turns, scales, shifts and dims each image twice, at random."""
    images = images[rng.permutation(len(images))]
    return [_view(images, rng) for _ in range(2)]


def _view(images, rng):
    n = len(images)
    angle, scale = rng.uniform(-0.25, 0.25, n), rng.uniform(0.8, 1.2, n)
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    shift_x, shift_y = rng.uniform(-1, 1, (2, n))
    # About the middle of the image, which lies between its pixels.
    shift_x += 3.5 * (1 - cos + sin)
    shift_y += 3.5 * (1 - cos - sin)
    zeros = np.zeros(n)
    transform = [cos, -sin, shift_x, sin, cos, shift_y, zeros, zeros]
    images = ops.image.affine_transform(
        images, np.stack(transform, axis=1).astype("float32")
    )
    contrast = rng.uniform(0.6, 1.4, (n, 1, 1, 1))
    return contrast * np.array(images) + rng.normal(0, 0.1, images.shape)


@dataclasses.dataclass
class Result:
    """What came of a way: the trained model, its weights, and measures."""

    model: keras.Model
    weights: np.ndarray
    measures: dict[str, float]


def train(way, epochs, data, held_out, seed):
    """Trains from the same weights on the same views in the same order."""
    keras.utils.set_random_seed(seed)
    encoder, model = make_models()
    model = wrap(way, model)
    model.compile(keras.optimizers.Adam(0.01), loss=nt_xent)
    targets = np.zeros(len(data.x_train))
    for views in epochs:
        model.fit(
            views,
            targets,
            batch_size=batch_size(way),
            shuffle=False,
            verbose=0,
        )
    pair = model.predict(held_out, batch_size=ROWS, verbose=0)
    measures = measure(
        encoder.predict(data.x_train, batch_size=ROWS, verbose=0),
        encoder.predict(data.x_validation, batch_size=ROWS, verbose=0),
        data,
    )
    measures["NT-Xent"] = float(ops.mean(nt_xent(None, pair)))
    return Result(model, flat(model.get_weights()), measures)


def measure(train_features, features, data):
    """How well features tell the digits that were held out, 0 to 1."""
    few = np.concatenate(
        [
            np.flatnonzero(data.y_train == digit)[:LABELS_PER_DIGIT]
            for digit in range(10)
        ]
    )
    scale = train_features.std()
    nearest = sklearn.neighbors.KNeighborsClassifier(5, metric="cosine")
    nearest.fit(train_features, data.y_train)
    linear = sklearn.linear_model.LogisticRegression(max_iter=1000)
    linear.fit(train_features[few] / scale, data.y_train[few])
    return {
        "5-NN": nearest.score(features, data.y_validation),
        "linear": linear.score(features / scale, data.y_validation),
    }


def gradient(model, views, rows):
    """The loss's gradient, its mean over parts of a batch with `rows` rows."""
    total = 0.0
    for begin in range(0, ROWS, rows):
        part = [view[begin : begin + rows] for view in views]
        with tf.GradientTape() as tape:
            loss = ops.mean(nt_xent(None, model(part, training=True)))
        total += flat(tape.gradient(loss, model.trainable_variables))
    return total * rows / ROWS


def flat(arrays):
    """Puts all numbers of some arrays into one vector."""
    return np.concatenate([np.ravel(each) for each in arrays])


def say_gradients(when, model, views):
    """Prints how far missing pairs turn the gradient of a batch."""
    large = gradient(model, views, ROWS)
    small = gradient(model, views, MICRO_BATCH_ROWS)
    lengths = np.linalg.norm(large), np.linalg.norm(small)
    angle = np.degrees(np.arccos(large @ small / np.prod(lengths)))
    print(
        f"{when}, the accumulated gradient is {angle:.0f} degrees off that of "
        f"the batch\nand {lengths[1] / lengths[0]:.2f} times as long."
    )


def run(seed):
    """Trains in the three ways, and looks at gradients before and after."""
    rng = np.random.default_rng(seed)
    data = digits.load(seed)
    epochs = [two_views(data.x_train, rng) for _ in range(EPOCHS)]
    held_out = two_views(data.x_validation, rng)
    keras.utils.set_random_seed(seed)
    _, model = make_models()
    say_gradients("Before training", model, epochs[0])
    results = {
        way: train(way, epochs, data, held_out, seed)
        for way in (UNCUT, CUT, ACCUMULATED)
    }
    say_gradients("After it", results[UNCUT].model, epochs[0])
    return results


def table(runs):
    """Lays out what came of the ways, as means over the runs."""
    names = list(runs[0][UNCUT].measures)
    lines = [row("", "weights", *names)]
    for way in runs[0]:
        values = [list(each[way].measures.values()) for each in runs]
        furthest = max(difference(each, way) for each in runs)
        cells = [f"{value:.3f}" for value in np.mean(values, axis=0)]
        lines.append(row(way, f"{furthest:.1e}", *cells))
    if len(runs) > 1:
        # Of runs with the same digits held out, and the same views.
        gaps = np.array(
            [
                [
                    each[ACCUMULATED].measures[name]
                    - each[UNCUT].measures[name]
                    for name in names
                ]
                for each in runs
            ]
        )
        errors = gaps.std(axis=0, ddof=1) / np.sqrt(len(runs))
        cells = [f"{gap:+.3f}" for gap in gaps.mean(axis=0)]
        lines.append(row(f"{ACCUMULATED} - {UNCUT}", "", *cells))
        cells = [f"{error:.3f}" for error in errors]
        lines.append(row("standard error", "", *cells))
    return "\n".join(lines)


def row(name, *cells):
    """One line of the table."""
    return f"{name:22}" + "".join(f"{cell:>12}" for cell in cells)


def difference(results, way):
    """Largest difference between the weights of a way and the uncut ones."""
    return np.abs(results[way].weights - results[UNCUT].weights).max()


def main(num_runs):
    """Prints the table of all runs, and asserts what is certain of it."""
    runs = [run(seed) for seed in range(num_runs)]
    print(table(runs))
    for results in runs:
        assert difference(results, CUT) <= TOLERANCE
        assert difference(results, ACCUMULATED) > 1e-3
    print("Cut with loss_scope, the training is that of the uncut batch.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    main(options.runs)
