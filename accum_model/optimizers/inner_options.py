"""Options of every optimizer, given to one that holds another."""

from typing import Any

import keras

from accum_model import checks
from accum_model import optimizer_chain

# Arguments of `keras.optimizers.Optimizer` that may be given to a wrapper, and
# their defaults.
OPTIONS = {
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
}


def give(optimizer: keras.optimizers.Optimizer, options: dict) -> None:
    """Sets options that a wrapper was given on the optimizer inside it.

    Raises:
        ValueError: If Keras does not know an option or refuses its value, or
            if the optimizer has another value.
    """
    if not options:
        return
    target = optimizer_chain.innermost(optimizer)
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(
                "Other arguments must be options of every Keras optimizer, "
                f"one of {tuple(OPTIONS)}. {checks.received(name, value)} "
                "Pass it to the inner optimizer."
            )
        own = getattr(target, name)
        if own not in (value, OPTIONS[name]):
            raise ValueError(
                f"`{name}` must be the same wherever it is given. Received: "
                f"{name}={value!r} and {name}={own!r} in an optimizer of type "
                f"{type(target).__name__}. Leave it out in one of the two "
                "places."
            )
    if target.built:
        raise ValueError(
            "Options must be given before the inner optimizer is built. "
            f"Received: {', '.join(options)} for an optimizer of type "
            f"{type(target).__name__} that has its variables. Pass a new one."
        )
    have: dict[str, Any] = {name: getattr(target, name) for name in OPTIONS}
    # Keras checks them when an optimizer is made.
    keras.optimizers.Optimizer(0.0, name="check", **{**have, **options})
    for name, value in options.items():
        setattr(target, name, value)
