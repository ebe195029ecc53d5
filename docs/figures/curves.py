"""Trains on the large batch and on accumulated ones, and draws both losses.

The digits of scikit-learn, in float64. Ends in an assertion.
"""

import pathlib

import drawing
import keras
import numpy as np
import sklearn.datasets

from accum_model import AccumModel

LARGE, ACCUM_STEPS, NUM_ROWS = 240, 5, 1200


def make_model() -> keras.Model:
    """A network of two layers, always with the same weights."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def train(
    model: keras.Model, batch_size: int, epochs: int
) -> tuple[list[float], list[np.ndarray]]:
    """Losses of the epochs, and the weights in the end."""
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(
        x[:NUM_ROWS] / 16.0,
        y[:NUM_ROWS],
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"], model.get_weights()


def main(folder: pathlib.Path = drawing.FOLDER, epochs: int = 12) -> None:
    """Writes `curves.svg`."""
    keras.config.set_floatx("float64")
    large, weights = train(make_model(), LARGE, epochs)
    model = AccumModel.wrap(make_model(), accum_steps=ACCUM_STEPS)
    small, others = train(model, LARGE // ACCUM_STEPS, epochs)
    worst = max(
        np.abs(a - b).max() for a, b in zip(weights, others, strict=True)
    )
    print(f"largest difference of weights: {worst:.1e}")
    assert worst < 1e-10, worst

    figure = drawing.new_figure(height=3.0)
    axes = figure.subplots()
    numbers = range(1, epochs + 1)
    axes.plot(
        numbers,
        large,
        color=drawing.ORANGE,
        linewidth=8,
        alpha=0.6,
        solid_capstyle="round",
        label="plain Keras, batches of 240",
    )
    axes.plot(
        numbers,
        small,
        color=drawing.BLUE,
        linewidth=2,
        label="batches of 48, accum_steps=5",
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    drawing.save(
        figure,
        "curves",
        "Training losses of the large batch and of accumulated small ones, one "
        "on top of the other.",
        folder,
    )


if __name__ == "__main__":
    main()
