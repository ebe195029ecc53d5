"""Decaying the learning rate, or raising the batch size instead.

Trains a small network on the digits of scikit-learn with a rate that falls
twice by a factor, and with one that stays while the batch grows by the same
factor (Smith et al., "Don't Decay the Learning Rate, Increase the Batch Size",
arXiv:1711.00489). A third run does neither.

    python docs/guides/batch_size_schedules.py --runs 5
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import sklearn.datasets

from accum_model import AccumCallback

BATCH_SIZE, RATE, FACTOR = 16, 0.2, 4
# Epochs at which the rate falls, or the batch grows.
FIRST, SECOND = 12, 20
NUM_TRAINING_ROWS = 1280


def make_model() -> keras.Model:
    """A network of two layers."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def rate_at(epoch: int) -> float:
    """The rate that falls."""
    return RATE / FACTOR ** ((epoch >= FIRST) + (epoch >= SECOND))


def callbacks(way: str) -> list[keras.callbacks.Callback]:
    """What makes a run one of the three."""
    if way == "larger batches":
        schedule = {0: 1, FIRST: FACTOR, SECOND: FACTOR**2}
        return [AccumCallback(schedule, verbose=0)]
    counting = AccumCallback(1, verbose=0)
    if way == "lower rate":
        return [
            counting,
            keras.callbacks.LearningRateScheduler(lambda e, _: rate_at(e)),
        ]
    return [counting]


def train(way: str, seed: int, epochs: int) -> dict[str, float]:
    """Trains on rows, and with weights, that depend on the seed only."""
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order] / 16.0, y[order]
    # Labels that are wrong keep gradients noisy until the end.
    wrong = np.random.default_rng(seed).random(NUM_TRAINING_ROWS) < 0.1
    labels = np.where(
        wrong, (y[:NUM_TRAINING_ROWS] + 1) % 10, y[:NUM_TRAINING_ROWS]
    )
    keras.utils.set_random_seed(seed)
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(RATE),
        loss,
        metrics=["accuracy"],
        steps_per_execution=10,  # Quicker; the numbers are the same.
    )
    history = model.fit(
        x[:NUM_TRAINING_ROWS],
        labels,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks(way),
    )
    training = model.evaluate(
        x[:NUM_TRAINING_ROWS], labels, batch_size=NUM_TRAINING_ROWS, verbose=0
    )
    held_out = model.evaluate(
        x[NUM_TRAINING_ROWS:], y[NUM_TRAINING_ROWS:], batch_size=1000, verbose=0
    )
    return {
        "updates": sum(history.history["updates"]),
        "training loss": training[0],
        "held-out loss": held_out[0],
        "accuracy": held_out[1],
    }


WAYS = ["neither", "lower rate", "larger batches"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=28)
    options = parser.parse_args()
    results = {
        way: [train(way, seed, options.epochs) for seed in range(options.runs)]
        for way in WAYS
    }
    columns = list(results[WAYS[0]][0])
    row = "{:22}" + "{:>15}" * len(columns)
    print(row.format("", *columns))

    def show(name, numbers):
        cells = [f"{numbers[0]:.0f}"] + [f"{each:.4f}" for each in numbers[1:]]
        print(row.format(name, *cells))

    table = {
        way: np.array([list(run.values()) for run in runs])
        for way, runs in results.items()
    }
    for way in WAYS:
        show(way, table[way].mean(0))
    difference = table["larger batches"] - table["lower rate"]
    show("larger - lower", difference.mean(0))
    show("standard error", difference.std(0, ddof=1) / options.runs**0.5)


if __name__ == "__main__":
    main()
