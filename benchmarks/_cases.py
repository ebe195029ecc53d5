"""The models that steps are timed on, each with a batch of made-up data."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

NUM_CLASSES = 10
NUM_IDS = 200_000


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        make_model: Builds the model, not compiled; its outputs are logits.
        make_inputs: From a generator and a number of rows to an array.
    """

    make_model: Callable[[], keras.Model]
    make_inputs: Callable[[np.random.Generator, int], np.ndarray]

    def model(self) -> keras.Model:
        """The model, with the same weights whenever it is made."""
        keras.utils.set_random_seed(0)
        return self.make_model()

    def data(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels."""
        rng = np.random.default_rng(0)
        x = self.make_inputs(rng, num_rows)
        return x, rng.integers(0, NUM_CLASSES, (num_rows,)).astype("int32")


def _mlp(num_inputs, *widths):
    inputs = keras.Input((num_inputs,))
    hidden = inputs
    for width in widths:
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(hidden))


def _cnn():
    inputs = keras.Input((64, 64, 3))
    hidden = inputs
    for filters in (16, 32, 64):
        hidden = keras.layers.Conv2D(
            filters, 3, strides=2, padding="same", activation="relu"
        )(hidden)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(hidden))


def _embedding():
    inputs = keras.Input((32,), dtype="int32")
    hidden = keras.layers.Embedding(NUM_IDS, 64)(inputs)
    hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(hidden))


LENGTH = 64
WIDTH = 128


def _transformer():
    layers = keras.layers
    inputs = keras.Input((LENGTH, WIDTH))
    hidden = layers.Dense(WIDTH)(layers.Masking()(inputs))
    for _ in range(2):
        attention = layers.MultiHeadAttention(4, WIDTH // 4)
        hidden = layers.LayerNormalization()(
            layers.Add()([hidden, attention(hidden, hidden)])
        )
        # Smooth: among millions of ReLUs rounding puts one on the other side
        # of its kink, and columns then differ by more than rounding.
        wide = layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        hidden = layers.LayerNormalization()(
            layers.Add()([hidden, layers.Dense(WIDTH)(wide)])
        )
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(hidden))


def _padded(rng, num_rows):
    """Sequences of a half to the whole length, zeros after them."""
    x = rng.normal(size=(num_rows, LENGTH, WIDTH)).astype("float32")
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, (num_rows, 1))
    x[np.arange(LENGTH) >= lengths] = 0
    return x


def normal(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Makes standard normal inputs of this shape per row."""
    return lambda rng, num_rows: rng.normal(size=(num_rows, *shape)).astype(
        "float32"
    )


def _distinct_ids(rng, num_rows):
    # Keras's optimizers do not agree with themselves on repeated ids, and
    # all columns are to train to the same weights.
    ids = rng.permutation(NUM_IDS)[: num_rows * 32]
    return ids.reshape(num_rows, 32).astype("int32")


CASES = {
    "small MLP": Case(lambda: _mlp(16, 32), normal(16)),
    "wide MLP": Case(lambda: _mlp(512, 1024, 1024, 1024), normal(512)),
    "CNN": Case(_cnn, normal(64, 64, 3)),
    "transformer": Case(_transformer, _padded),
    "embedding": Case(_embedding, _distinct_ids),
}
