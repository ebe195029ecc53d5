"""Notices that `fit` fails, which Keras tells no callback.

The training step, the validation step and every hook are watched; a failure
anywhere else shows by the list of callbacks going away.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# How the training step says that the data has ended.
_END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)


def watch_callbacks(
    callback_list: keras.callbacks.CallbackList,
    on_failure: Callable[[], None],
) -> weakref.finalize:
    """Calls `on_failure` when a hook raises or the list is given up.

    Args:
        callback_list: The list that a `fit` is using.
        on_failure: Called before the exception goes on; may be called again.

    Returns:
        What waits for the end of the list. Call it once the list no longer
        counts: Python may free the frames of a `fit`, and the list with them,
        as late as in the middle of another one.
    """
    # The list must not hold itself, or it would outlive a failed `fit`.
    reference = weakref.ref(callback_list)

    def call(name, *args, **kwargs):
        hook = getattr(type(reference()), name)
        return guarded(hook, on_failure)(reference(), *args, **kwargs)

    for name in dir(callback_list):
        if name.startswith("on_"):
            setattr(callback_list, name, functools.partial(call, name))
    end_of_list = weakref.finalize(callback_list, on_failure)
    end_of_list.atexit = False
    return end_of_list


def guarded(
    function: Callable[..., Any], on_failure: Callable[[], None]
) -> Callable[..., Any]:
    """Returns `function` with a call of `on_failure` before it raises."""

    @functools.wraps(function)
    def guarded_function(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except _END_OF_DATA:
            raise
        except BaseException:
            on_failure()
            raise

    return guarded_function
