"""Reading a file into a model: all of it, or nothing."""

import contextlib
from collections.abc import Iterator

import keras

from accum_model import nesting


@contextlib.contextmanager
def all_or_nothing(model: keras.Model) -> Iterator[None]:
    """Gives weights and optimizer their values back if the block raises.

    Keras reads a file part by part, and leaves what it has read before the
    part that does not fit.
    """
    optimizer = nesting.find_in(model)
    variables = list(model.variables)
    if optimizer is not None:
        variables += optimizer.variables
        was_stale = optimizer.partial_cycle_is_stale
    # No copies: TensorFlow keeps a value that somebody holds.
    values = [variable.numpy() for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        if optimizer is not None:
            optimizer.partial_cycle_is_stale = was_stale
        raise
