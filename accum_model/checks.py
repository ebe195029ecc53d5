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

from accum_model import optimizer_chain

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


def options_in_one_place(first: str, second: str, options: dict) -> None:
    """Refuses options for an optimizer that has its own."""
    given = {
        name: value for name, value in options.items() if value is not None
    }
    if given:
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"Options of {first} must not be given when {second} is there: "
            f"{', '.join(f'`{name}`' for name in given)}. Received: {listed} "
            f"({first}). Pass them to {second}."
        )


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


def optimizer(name: str, value: Any) -> keras.optimizers.Optimizer:
    """Returns `value` as a Keras optimizer, made from a name or a config.

    Raises:
        TypeError: If `value` is no optimizer, name or config.
        ValueError: If the name or the config is not known, or if the
            optimizer accumulates gradients by itself.
    """
    if isinstance(value, (str, Mapping)):
        try:
            value = keras.optimizers.get(value)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"`{name}` must name a Keras optimizer or hold the config of "
                f"one. {received(name, value)} Pass an instance, such as "
                "keras.optimizers.Adam(1e-3)."
            ) from error
    if not isinstance(value, keras.optimizers.Optimizer):
        way_out = "Pass a name, a config or an instance of a Keras optimizer."
        if comes_from_tf_keras(value):
            way_out = (
                "It is an optimizer of tf_keras (Keras 2). Take the one of the "
                "same name in keras.optimizers (Keras 3)."
            )
        raise TypeError(
            f"`{name}` must be a Keras optimizer. {received(name, value)} "
            f"{way_out}"
        )
    return value


def accumulates_once(name: str, value: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer that accumulates by Keras's own option too."""
    for each in optimizer_chain.chain(value):
        steps = each.gradient_accumulation_steps
        if steps:
            raise ValueError(
                f"`{name}` must not accumulate gradients itself. Received: "
                f"gradient_accumulation_steps={steps!r} in an optimizer of "
                f"type {type(each).__name__}. Leave "
                "`gradient_accumulation_steps` out and pass "
                f"accum_steps={steps!r} instead."
            )


def scales_once(name: str, value: keras.optimizers.Optimizer | None) -> None:
    """Refuses two loss scales, of which the second divides for nothing."""
    num_scaling = sum(
        isinstance(each, keras.optimizers.LossScaleOptimizer)
        for each in optimizer_chain.chain(value)
    )
    if num_scaling > 1:
        raise ValueError(
            f"`{name}` must scale the loss once. Received: {num_scaling} "
            f"LossScaleOptimizers in an optimizer of type "
            f"{type(value).__name__}; Keras adds one under a mixed_float16 "
            "policy. Leave yours out, or pass auto_scale_loss=False to "
            "model.compile."
        )


def not_nested(name: str, value: keras.optimizers.Optimizer, cls: type) -> None:
    """Refuses an accumulating optimizer inside another one."""
    found = optimizer_chain.find(value, cls)
    if found is not None:
        raise ValueError(
            f"`{name}` must not be, or hold, an {type(found).__name__}, "
            "because cycles do not nest. Received: "
            f"{name} with accum_steps={found.accum_steps!r} inside. Pass "
            "its inner_optimizer and the product of both accum_steps."
        )


def same_number(grads: list, variables: list) -> None:
    """Raises unless there is one gradient per variable."""
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` must hold one item per variable. Received: "
            f"len(grads)={len(grads)} and {len(variables)} variables. Pass "
            "None for a variable without a gradient."
        )


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


def strategy(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns `strategy`; raises for those whose replicas keep no copies."""
    refused = (
        tf.distribute.ParameterServerStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
    )
    if isinstance(strategy, refused):
        raise ValueError(
            "`strategy` must give each replica a copy of the variables, which "
            "all of them update together. Received: "
            f"{type(strategy).__name__}. Use tf.distribute.MirroredStrategy "
            "on one machine, or tf.distribute.MultiWorkerMirroredStrategy on "
            "several."
        )
    return strategy


def keras_model(name: str, value: Any) -> keras.Model:
    """Returns `value`; raises unless it is a model of Keras 3."""
    if isinstance(value, keras.Model):
        return value
    way_out = "Pass an instance of keras.Model."
    if comes_from_tf_keras(value):
        way_out = (
            "It is a model of tf_keras (Keras 2). Build it with keras (Keras "
            "3) instead; unset TF_USE_LEGACY_KERAS if tf.keras is used."
        )
    raise TypeError(
        f"`{name}` must be a Keras 3 model. {received(name, value)} {way_out}"
    )


def not_wrapped(value: keras.Model, cls: type) -> None:
    """Refuses to wrap a model that accumulates already."""
    if isinstance(value, cls):
        raise ValueError(
            f"`model` must not be an {cls.__name__} already. Received: "
            f"model={value.name!r} with accum_steps={value.accum_steps!r}. "
            "Set model.accum_steps instead."
        )


def only_one(callbacks: list, cls: type) -> None:
    """Refuses two callbacks that would both end cycles."""
    found = [item for item in callbacks if isinstance(item, cls)]
    if len(found) > 1:
        raise ValueError(
            "The list of callbacks must hold one `AccumCallback` only. "
            f"Received: {len(found)} of them. Leave one out."
        )


def not_in_use(is_in_use: bool, callback: keras.callbacks.Callback) -> None:
    """Refuses a callback that an outer `fit` is using."""
    if is_in_use:
        name = type(callback).__name__
        raise RuntimeError(
            f"`{name}` must serve one fit at a time. Received: the same object "
            "inside a fit that has not ended. Pass another one, such as "
            f"{name}()."
        )


def compiled(model: keras.Model) -> None:
    """Raises unless `model` was compiled with an optimizer."""
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "`AccumCallback` needs a model that is compiled with an optimizer. "
            f"Received: model={model.name!r} (of type {type(model).__name__}), "
            "not compiled. Call model.compile(optimizer, loss) first."
        )


def same_accum_steps(first: str, one: int, second: str, other: int) -> None:
    """Raises if `accum_steps` was given twice with different values."""
    if one != other:
        raise ValueError(
            "`accum_steps` must be the same wherever it is given. Received: "
            f"accum_steps={one!r} ({first}) and accum_steps={other!r} "
            f"({second}). Leave it out in one of the two places."
        )


def comes_from_tf_keras(value: Any) -> bool:
    """True when the class of `value`, or a base of it, is from tf_keras."""
    return any(
        cls.__module__.split(".")[0] == "tf_keras"
        for cls in type(value).__mro__
    )
