"""The four ways to train, from the same weights, on the same rows."""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from accum_model.callback import AccumCallback
from accum_model.demo import digits
from accum_model.model import AccumModel

SEED = 1


@dataclasses.dataclass
class Way:
    """One way to train.

    Attributes:
        name: Name in the table.
        heading: Line printed before the run.
        make_model: Makes the compiled model.
        batch_size: Rows that the model sees at once.
        callbacks: Callbacks for `fit`.
    """

    name: str
    heading: str
    make_model: Callable[[], keras.Model]
    batch_size: int
    callbacks: list[keras.callbacks.Callback]


@dataclasses.dataclass
class Result:
    """What came of a way.

    Attributes:
        name: Name of the way.
        losses: Training loss of each epoch.
        accuracy: Share of the validation rows that are recognised, 0 to 1.
        updates: Updates made.
        weights: Weights of the trained model, layer by layer.
        seconds: Seconds that `fit` took.
    """

    name: str
    losses: list[float]
    accuracy: float
    updates: int
    weights: list[np.ndarray]
    seconds: float

    def largest_difference(self, other: "Result") -> float:
        """Largest absolute difference between the weights of two results."""
        pairs = zip(self.weights, other.weights, strict=True)
        # Not Python's max, which may lose a NaN.
        return float(np.max([np.max(np.abs(a - b)) for a, b in pairs]))


def train_all(batch_size: int, accum_steps: int, epochs: int) -> list[Result]:
    """Trains the network with the large batch, then in three other ways.

    Args:
        batch_size: int >= 1, rows of the large batch.
        accum_steps: int >= 1, batches per update. Divides `batch_size`.
        epochs: int >= 1.

    Returns:
        Results, that of the large batch first.
    """
    data = digits.load(SEED)
    ways = four_ways(batch_size, accum_steps)
    results = []
    for number, way in enumerate(ways, start=1):
        print(f"\n{number} of {len(ways)}: {way.heading}", flush=True)
        results.append(train(way, data, epochs))
    return results


def four_ways(batch_size: int, accum_steps: int) -> list[Way]:
    """The large batch and the three ways to accumulate as many rows."""
    rows = batch_size // accum_steps
    settings = f"batch_size={rows}, accum_steps={accum_steps}"
    return [
        Way(
            "large batch",
            f"plain Keras, the large batch: batch_size={batch_size}",
            lambda: network(keras.Model),
            batch_size,
            [],
        ),
        Way(
            "AccumModel.wrap",
            f"the same model in AccumModel.wrap: {settings}",
            lambda: AccumModel.wrap(
                network(keras.Model), accum_steps=accum_steps
            ),
            rows,
            [],
        ),
        Way(
            "class Net(AccumModel)",
            f"AccumModel as its base class: {settings}",
            lambda: network(AccumModel, accum_steps=accum_steps),
            rows,
            [],
        ),
        Way(
            "AccumCallback",
            f"plain Keras with an AccumCallback: {settings}",
            lambda: network(keras.Model),
            rows,
            [AccumCallback(accum_steps)],
        ),
    ]


def network(base: type[keras.Model], **kwargs: Any) -> keras.Model:
    """Makes and compiles the network, always with the same weights.

    Args:
        base: Its base class, `keras.Model` or `AccumModel`.
        **kwargs: For the constructor of `base`.
    """

    class Net(base):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.stack = keras.Sequential(
                [
                    keras.Input((8, 8, 1)),
                    keras.layers.Conv2D(16, 3, activation="relu"),
                    keras.layers.Conv2D(32, 3, activation="relu"),
                    keras.layers.Flatten(),
                    keras.layers.Dense(10),
                ]
            )

        def call(self, images: Any) -> Any:
            return self.stack(images)

    keras.utils.set_random_seed(SEED)
    net = Net(**kwargs)
    net.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return net


def train(way: Way, data: digits.Digits, epochs: int) -> Result:
    """Trains one way; shows progress bars in a terminal, else lines."""
    model = way.make_model()
    start = time.perf_counter()
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=way.batch_size,
        epochs=epochs,
        shuffle=False,
        validation_data=(data.x_validation, data.y_validation),
        callbacks=way.callbacks,
        verbose=1 if sys.stdout.isatty() else 2,
    ).history
    return Result(
        name=way.name,
        losses=history["loss"],
        accuracy=history["val_accuracy"][-1],
        updates=int(model.optimizer.iterations.numpy()),
        weights=model.get_weights(),
        seconds=time.perf_counter() - start,
    )
