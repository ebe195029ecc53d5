"""The 1,797 handwritten digits that come with scikit-learn, 8 x 8 pixels."""

from typing import NamedTuple

import keras
import numpy as np

# No multiple of 256: the last batch of an epoch is a short one.
TRAINING_ROWS = 1437
VALIDATION_ROWS = 360


class Digits(NamedTuple):
    """Images of shape (rows, 8, 8, 1) from 0 to 1, and the digits they show."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_validation: np.ndarray
    y_validation: np.ndarray


def load(seed: int) -> Digits:
    """Loads the digits, shuffled once, in the precision of Keras.

    Args:
        seed: int >= 0. The same seed gives the same order of rows.

    Returns:
        The `TRAINING_ROWS` first and the `VALIDATION_ROWS` other rows.
    """
    import sklearn.datasets  # Only the demo needs it.

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    x = images[order].reshape(-1, 8, 8, 1) / 16
    x, y = x.astype(keras.config.floatx()), labels[order]
    n = TRAINING_ROWS
    return Digits(x[:n], y[:n], x[n:], y[n:])
