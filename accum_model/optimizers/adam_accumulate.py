"""AdamAccumulate: Adam on the mean gradient of several batches.

With :math:`n` updates made, the rate is

.. math:: \\alpha_n = \\alpha / (1 + \\text{decay} \\cdot n).

Kingma and Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980.
"""

from typing import Any

import keras
import tensorflow as tf

from accum_model import checks
from accum_model import optimizer_chain
from accum_model.optimizer import AccumOptimizer
from accum_model.optimizers import argument_checks
from accum_model.optimizers import update_rate


@keras.saving.register_keras_serializable(package="accum_model")
class DecayingAdam(update_rate.UpdateRate, keras.optimizers.Adam):
    """Adam with inverse-time decay, whose rate can still be set.

    Args:
        *args: As for `keras.optimizers.Adam`.
        decay: Number >= 0. Defaults to 0.0.
        **kwargs: As for `keras.optimizers.Adam`.
    """

    def __init__(self, *args: Any, decay: float = 0.0, **kwargs: Any) -> None:
        decay = argument_checks.at_least("decay", decay, 0)
        super().__init__(*args, **kwargs)
        self.decay = decay

    def has_own_rate(self) -> bool:
        """True with a decay."""
        return self.decay > 0

    def rate_of_update(
        self, learning_rate: tf.Tensor, number: tf.Tensor
    ) -> tf.Tensor:
        """The decayed rate; the first update has the full one."""
        return learning_rate / (1 + self.decay * (number - 1))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "decay": self.decay}


@keras.saving.register_keras_serializable(package="accum_model")
class AdamAccumulate(AccumOptimizer):
    """Adam that updates once per `accum_iters` batches.

    An `AccumOptimizer` around Adam, under the name and with the arguments by
    which people know it; ``AccumOptimizer(keras.optimizers.Adam(), 4)`` gives
    the same numbers. Bias corrections, decay and schedules count updates.

    Args:
        learning_rate: float, `LearningRateSchedule` or callable. Defaults to
            0.001.
        beta_1: Decay rate of the mean of gradients. Defaults to 0.9.
        beta_2: Decay rate of the mean of their squares. Defaults to 0.999.
        epsilon: Number >= 0, added to the root of the second moment, or None
            for `keras.config.epsilon()`. Defaults to None.
        amsgrad: bool. True to divide by the largest second moment so far.
            Defaults to False.
        accum_iters: int >= 1, `accum_steps` of an `AccumOptimizer`.
            Micro-batches per update. Defaults to 1.
        decay: Number >= 0. The rate is ``learning_rate / (1 + decay *
            updates)``. Defaults to 0.0.
        nonfinite: As for `AccumOptimizer`. Defaults to None.
        accum_dtype: As for `AccumOptimizer`. Defaults to None.
        gradient_transform: As for `AccumOptimizer`. Defaults to None.
        name: Name of the optimizer, or None for a generated one.
        **kwargs: As for `keras.optimizers.Adam`: `weight_decay`, `clipnorm`,
            `use_ema` and so on.

    Attributes:
        inner_optimizer: Adam.

    Raises:
        ValueError: If an argument is not in its range.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(AdamAccumulate(1e-3, accum_iters=4), "mse")
        >>> model.optimizer.accum_iters
        4
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float | None = None,
        amsgrad: bool = False,
        accum_iters: int = 1,
        decay: float = 0.0,
        *,
        nonfinite: str | None = None,
        accum_dtype: str | None = None,
        gradient_transform: Any = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        accum_iters = checks.positive_int(
            "accum_iters", accum_iters, "Pass 1 to update after every batch."
        )
        if epsilon is None:
            epsilon = keras.config.epsilon()
        epsilon = argument_checks.at_least("epsilon", epsilon, 0)
        super().__init__(
            DecayingAdam(
                learning_rate,
                beta_1,
                beta_2,
                epsilon,
                amsgrad,
                decay=decay,
                **kwargs,
            ),
            accum_iters,
            nonfinite=nonfinite,
            accum_dtype=accum_dtype,
            gradient_transform=gradient_transform,
            name=name,
        )

    @property
    def accum_iters(self) -> int:
        """Micro-batches per update; another name of `accum_steps`."""
        return self.accum_steps

    @accum_iters.setter
    def accum_iters(self, accum_iters: int) -> None:
        self.accum_steps = accum_iters

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        config = super().get_config()
        adam = optimizer_chain.innermost(self)
        wrapped = config.pop("inner_optimizer")
        config["accum_iters"] = config.pop("accum_steps")
        config = {**adam.get_config(), **config}
        if self.inner_optimizer is not adam:
            # Mixed precision has put loss scaling between.
            config["inner_optimizer"] = wrapped
        return config

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> "AdamAccumulate":
        """Makes an optimizer from what `get_config` returned."""
        config = dict(config)
        wrapped = config.pop("inner_optimizer", None)
        for name in ("learning_rate", "gradient_transform"):
            value = config.get(name)
            if isinstance(value, dict):
                config[name] = keras.saving.deserialize_keras_object(
                    value, custom_objects=custom_objects
                )
        optimizer = cls(**config)
        if wrapped is not None:
            optimizer.inner_optimizer = keras.saving.deserialize_keras_object(
                wrapped, custom_objects=custom_objects
            )
        return optimizer
