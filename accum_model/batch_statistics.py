"""The warning about batch normalisation, which sees one micro-batch only."""

import warnings
import weakref

import keras

from accum_model import _keras_compat

_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def warn_once(model: keras.Model, what: str) -> None:
    """Warns if a batch normalisation of `model` is in training.

    Frozen ones, and other normalisations, do not depend on the other rows.

    Args:
        model: The model to be trained.
        what: What makes micro-batches of its batches, such as
            `"micro_batch_size=4"`.
    """
    if model in _warned:
        return
    names = [
        layer.name
        for layer in _keras_compat.flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not getattr(layer, "pools_moments", False)
    ]
    if names:
        _warned.add(model)
        warnings.warn(
            f"BatchNormalization layers {names} normalise with the rows of one "
            f"micro-batch ({what}): the update is not exactly that of the "
            "large batch, and their statistics move once per micro-batch. With "
            "AccumBatchNormalization instead they move once per update, like "
            "those of the large batch. To be exact, freeze them "
            "(trainable=False) or take another normalisation, such as "
            "GroupNormalization. To silence this: "
            "warnings.filterwarnings('ignore', 'BatchNormalization').",
            stacklevel=2,
        )
