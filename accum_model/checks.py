"""Checks of arguments, and the wording of every error they raise.

Each check takes the argument's name and the value received, and returns the
value in its normal form. None of them creates or changes any state.
"""

import inspect
import numbers
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

# Default of an `accum_steps` that may also be given elsewhere.
NOT_GIVEN: Any = type("NotGiven", (), {"__repr__": lambda self: "1"})()

REMAINDERS = ("flush", "carry", "drop")


def received(name: str, value: Any) -> str:
    """Names the value received and its type, as every error does."""
    return f"Received: {name}={value!r} (of type {type(value).__name__})."


def positive_int(name: str, value: Any, way_out: str) -> int:
    """Returns `value` as an int; raises unless it is an int >= 1.

    Booleans are refused although Python counts them as ints; NumPy's integers
    are taken.
    """
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < 1:
        raise ValueError(
            f"`{name}` must be an int >= 1. {received(name, value)} {way_out}"
        )
    return int(value)


def accum_steps(value: Any) -> int:
    """Checks batches per update."""
    way_out = "Pass 1 to update after every batch."
    if isinstance(value, Mapping):
        way_out = "Only AccumCallback takes a schedule {epoch: accum_steps}."
    return positive_int("accum_steps", value, way_out)


def accum_steps_or_schedule(value: Any) -> int | dict[int, int] | None:
    """Checks what `AccumCallback` takes: None, an int or `{epoch: int}`."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return accum_steps(value)
    for epoch in value:
        is_int = isinstance(epoch, numbers.Integral)
        if not is_int or isinstance(epoch, bool) or epoch < 0:
            raise ValueError(
                "The keys of an `accum_steps` schedule must be epochs, ints "
                f">= 0. {received('epoch', epoch)} "
                "Write it as {0: 2, 10: 8}: 2 from the start, 8 from epoch 10."
            )
    if 0 not in value:
        raise ValueError(
            "An `accum_steps` schedule must say what holds from epoch 0. "
            f"{received('accum_steps', value)} "
            "Add the key 0, as in {0: 2, 10: 8}."
        )
    return {int(epoch): accum_steps(k) for epoch, k in sorted(value.items())}


def remainder(value: Any) -> str:
    """Checks what happens to a partial cycle at the end of an epoch."""
    if not isinstance(value, str) or value not in REMAINDERS:
        raise ValueError(
            f"`remainder` must be one of {REMAINDERS}. "
            f"{received('remainder', value)} "
            'Pass "flush" to apply what was collected when the epoch ends.'
        )
    return value


def nonfinite(value: Any) -> str | None:
    """Checks what happens to gradients that are not finite."""
    known = (None, "skip_micro_batch", "skip_update", "raise")
    if not (value is None or isinstance(value, str)) or value not in known:
        raise ValueError(
            f"`nonfinite` must be one of {known}. "
            f"{received('nonfinite', value)} "
            'Pass "skip_micro_batch" to go on without the bad micro-batch.'
        )
    return value


def accum_dtype(value: Any) -> str | None:
    """Checks the dtype of the buffers; None stands for the default."""
    if value is None:
        return None
    try:
        dtype = keras.backend.standardize_dtype(value)
    except (ValueError, TypeError):
        dtype = None
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(
            "`accum_dtype` must be None or a float dtype. "
            f"{received('accum_dtype', value)} Pass None for float32 (float64 "
            "for float64 variables)."
        )
    return dtype


def gradient_transform(value: Any) -> Any:
    """Checks that the transform can be called."""
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise TypeError(
            "`gradient_transform` must be None or a callable (gradients, "
            f"variables) -> gradients. {received('gradient_transform', value)} "
            "Pass a function, or an instance such as "
            "AdaptiveGradientClipping(0.01)."
        )
    if value is not None and not _takes_two(value):
        raise TypeError(
            "`gradient_transform` must take two arguments, (gradients, "
            f"variables). {received('gradient_transform', value)} Give it both "
            "parameters, also where it needs the gradients only."
        )
    return value


def _takes_two(function):
    try:
        signature = inspect.signature(function)
    except ValueError:  # Of a built-in function, which does not tell.
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def transformed(
    gradients: Any, before: list[tf.Tensor], transform: Any
) -> list[tf.Tensor]:
    """Checks what a gradient transform returned."""
    name = getattr(transform, "__name__", type(transform).__name__)
    if not isinstance(gradients, (list, tuple)) or (
        len(gradients) != len(before)
    ):
        got = (
            f"{len(gradients)}" if hasattr(gradients, "__len__") else "no list"
        )
        raise ValueError(
            "`gradient_transform` must return one gradient per variable. "
            f"Received: {got} from {name} for {len(before)} variables. Return "
            "a list in the order of the variables."
        )
    result = []
    for new, old in zip(gradients, before, strict=True):
        try:
            new = tf.cast(new, old.dtype)
        except (TypeError, ValueError, tf.errors.OpError) as error:
            raise ValueError(
                "`gradient_transform` must return tensors. "
                f"{received('item', new)} It comes from {name}. Return the "
                "gradient itself where there is nothing to change."
            ) from error
        if not new.shape.is_compatible_with(old.shape):
            raise ValueError(
                "`gradient_transform` must keep the shape of each gradient. "
                f"Received: shape {tuple(new.shape)} from {name} for a "
                f"gradient of shape {tuple(old.shape)}. Return gradients in "
                "the order of the variables."
            )
        result.append(new)
    return result


def micro_batch_weight(value: Any) -> tf.Tensor:
    """Checks what `micro_batch_weight` returned."""
    tensor = tf.convert_to_tensor(value)
    tensor = tensor if tensor.dtype.is_floating else tf.cast(tensor, "float64")
    static = tf.get_static_value(tensor)
    if tensor.shape.rank != 0 or (static is not None and not static >= 0):
        raise ValueError(
            "`micro_batch_weight` must return a scalar >= 0. Received: "
            f"{'a value of shape ' if tensor.shape.rank else ''}"
            f"{tuple(tensor.shape) if tensor.shape.rank else static!r}. Return "
            "the denominator of the mean loss, such as the number of rows."
        )
    if static is None:
        with tf.control_dependencies(
            [
                tf.debugging.assert_non_negative(
                    tensor, "`micro_batch_weight` must return a scalar >= 0."
                )
            ]
        ):
            tensor = tf.identity(tensor)
    return tensor


def positive_number(name: str, value: Any) -> float:
    """Returns `value` as a float; raises unless it is a finite number > 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(
            f"`{name}` must be a finite number > 0. {received(name, value)} "
            "Leave it out for the default."
        )
    return float(value)


def verbose(value: Any) -> int:
    """Checks `verbose` of the callback."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value not in (0, 1):
        raise ValueError(
            f"`verbose` must be 0 or 1. {received('verbose', value)} "
            "Pass 0 for silence, 1 for one line per fit."
        )
    return int(value)


def noise_scale(value: Any) -> bool:
    """Checks `noise_scale` of the callback."""
    if not isinstance(value, bool):
        raise ValueError(
            "`noise_scale` must be True or False. "
            f"{received('noise_scale', value)} Pass True to have it estimated."
        )
    return value


def weight(value: Any, dtype: str) -> tf.Tensor:
    """Returns a micro-batch's weight as a scalar tensor of `dtype`."""
    if isinstance(value, (bool, str, bytes)):
        raise ValueError(
            f"`weight` must be a scalar >= 0. {received('weight', value)} "
            "Pass the number of rows of the micro-batch."
        )
    tensor = tf.cast(value, dtype)
    if tensor.shape.rank != 0:
        raise ValueError(
            "`weight` must be a scalar >= 0. Received: weight of shape "
            f"{tuple(tensor.shape)}. Pass the number of rows, or the sum of "
            "the sample weights, of the micro-batch."
        )
    static = tf.get_static_value(tensor)
    if static is not None and not static >= 0:
        raise ValueError(
            f"`weight` must be a scalar >= 0. {received('weight', value)} "
            "Pass the number of rows of the micro-batch."
        )
    return tensor


def comes_from_tf_keras(value: Any) -> bool:
    """True when the class of `value`, or a base of it, is from tf_keras."""
    return any(
        cls.__module__.split(".")[0] == "tf_keras"
        for cls in type(value).__mro__
    )
