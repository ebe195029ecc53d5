"""Notices weights that were frozen or unfrozen without a new `compile`.

A training step that is compiled already goes on with the weights it was
compiled for; Keras says nothing.
"""

import warnings
import weakref
from typing import NamedTuple

import keras

from accum_model import _keras_compat


class _Trained(NamedTuple):
    """What a model was trained with: by whose `compile`, and the weights.

    Attributes:
        compile_record: See `_keras_compat.compile_record`.
        paths: Paths of the trainable weights, by id.
        known: Ids of all weights that existed; others were made since.
    """

    compile_record: weakref.ref[object]
    paths: dict[int, str]
    known: set[int]


_trained: weakref.WeakKeyDictionary[keras.Model, _Trained] = (
    weakref.WeakKeyDictionary()
)


def warn_of_change(model: keras.Model) -> None:
    """Warns if other weights are trainable than in the last `fit`.

    Not if the model was compiled in between, which is what it asks for.
    """
    record = _keras_compat.compile_record(model)
    if record is None:
        return
    paths = {id(each): each.path for each in model.trainable_variables}
    before = _trained.get(model)
    known = {id(each) for each in model.variables}
    _trained[model] = _Trained(weakref.ref(record), paths, known)
    if before is None or before.compile_record() is not record:
        return
    changed = [
        {**before.paths, **paths}[key]
        for key in before.paths.keys() ^ paths.keys()
        if key in before.known
    ]
    if changed:
        warnings.warn(
            f"`trainable` has changed for {sorted(changed)} since the model "
            "was compiled. As in Keras, a training step that was compiled "
            "before does not know. Call model.compile again.",
            stacklevel=2,
        )
