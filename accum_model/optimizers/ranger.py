"""Ranger: Lookahead around RAdam, see `lookahead` and `radam`.

The combination is Less Wright's,
https://github.com/lessw2020/Ranger-Deep-Learning-Optimizer.
"""

from typing import Any

import keras

from accum_model.optimizers import argument_checks
from accum_model.optimizers.lookahead import Lookahead
from accum_model.optimizers.radam import RAdam


@keras.saving.register_keras_serializable(package="accum_model")
class Ranger(Lookahead):
    """Lookahead with RAdam as the inner optimizer.

    Args:
        learning_rate: As for `RAdam`. Defaults to 0.001.
        beta_1: As for `RAdam`. Defaults to 0.9.
        beta_2: As for `RAdam`. Defaults to 0.999.
        epsilon: As for `RAdam`. Defaults to 1e-7.
        amsgrad: As for `RAdam`. Defaults to False.
        sma_threshold: As for `RAdam`. Defaults to 5.0.
        total_steps: As for `RAdam`. Defaults to 0.
        warmup_proportion: As for `RAdam`. Defaults to 0.1.
        min_learning_rate: As for `RAdam`. Defaults to 0.0.
        degenerate_to_sgd: As for `RAdam`. Defaults to True.
        sync_period: As for `Lookahead`. Defaults to 6.
        slow_step_size: As for `Lookahead`. Defaults to 0.5.
        name: Name of the optimizer, or None for a generated one.
        **kwargs: As for `keras.optimizers.Optimizer`: `weight_decay`,
            `clipnorm`, `use_ema` and so on.

    Attributes:
        inner_optimizer: The `RAdam`.

    Raises:
        ValueError: If an argument is not in its range.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(Ranger(1e-3, weight_decay=1e-2), "mse")
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        sma_threshold: float = 5.0,
        total_steps: int = 0,
        warmup_proportion: float = 0.1,
        min_learning_rate: float = 0.0,
        degenerate_to_sgd: bool = True,
        sync_period: int = 6,
        slow_step_size: float = 0.5,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        # Before the inner optimizer makes variables.
        argument_checks.sync_period(sync_period)
        argument_checks.slow_step_size(slow_step_size)
        inner_optimizer = RAdam(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            amsgrad,
            sma_threshold,
            total_steps,
            warmup_proportion,
            min_learning_rate,
            degenerate_to_sgd,
            **kwargs,
        )
        super().__init__(inner_optimizer, sync_period, slow_step_size, name)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            **self.inner_optimizer.get_config(),
            "sync_period": self.sync_period,
            "slow_step_size": self.slow_step_size,
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> "Ranger":
        """Makes an optimizer from what `get_config` returned."""
        # Its arguments are those of an optimizer that wraps nothing.
        from_config = keras.optimizers.Optimizer.from_config.__func__
        return from_config(cls, config, custom_objects)
