"""What the user asked of a model, kept until it has an optimizer."""

from typing import Any

import keras

from accum_model import checks
from accum_model import model_checks
from accum_model import nesting
from accum_model import optimizer_checks
from accum_model.cut import cut_checks
from accum_model.cut.cutting import Cutting


class Settings:
    """Checked settings, and whether `accum_steps` was given at all.

    Args:
        accum_steps: int >= 1, or `checks.NOT_GIVEN`.
        remainder: `"flush"`, `"carry"` or `"drop"`.
        nonfinite: As for `AccumOptimizer`.
        accum_dtype: As for `AccumOptimizer`.
        gradient_transform: As for `AccumOptimizer`.
        micro_batch_size: None, int >= 1 or `"auto"`.
        loss_scope: `"micro_batch"` or `"batch"`.

    Attributes:
        cutting: How batches are cut inside the step.
        options: Options of the `AccumOptimizer` to be made, by name.
    """

    def __init__(
        self,
        accum_steps: Any,
        remainder: Any,
        nonfinite: Any = None,
        accum_dtype: Any = None,
        gradient_transform: Any = None,
        micro_batch_size: Any = None,
        loss_scope: Any = "micro_batch",
    ) -> None:
        self.is_given = accum_steps is not checks.NOT_GIVEN
        self.accum_steps = (
            checks.accum_steps(accum_steps) if self.is_given else 1
        )
        self.remainder = checks.remainder(remainder)
        self.cutting = Cutting(micro_batch_size, loss_scope)
        self.options = {
            "nonfinite": checks.nonfinite(nonfinite),
            "accum_dtype": checks.accum_dtype(accum_dtype),
            "gradient_transform": checks.gradient_transform(gradient_transform),
        }

    def give(self, accum_steps: int) -> None:
        """Takes a value of `accum_steps` that the user has set."""
        self.is_given = True
        self.accum_steps = accum_steps

    def take_over(self, config: dict[str, Any]) -> None:
        """Takes the values of a compile config that comes from a file.

        Args:
            config: Loses what is not for `compile`. The options of its
                optimizer go before those given to the model.
        """
        self.remainder = config.pop("remainder", self.remainder)
        self.cutting = Cutting(
            config.pop("micro_batch_size", self.cutting.micro_batch_size),
            config.pop("loss_scope", self.cutting.loss_scope),
        )
        optimizer = nesting.find(config.get("optimizer"))
        if optimizer is not None:
            self.give(optimizer.accum_steps)
            self.options = dict.fromkeys(self.options)

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Raises if `optimizer` contradicts the settings."""
        optimizer_checks.scales_once("optimizer", optimizer)
        inner = nesting.find(optimizer)
        steps = max(self.accum_steps, getattr(inner, "accum_steps", 1))
        cut_checks.updates_every_step(optimizer, steps)
        if inner is None:
            if self.accum_steps > 1:
                optimizer_checks.accumulates_once("optimizer", optimizer)
            return
        if self.accum_steps > 1 and inner.accum_steps > 1:
            model_checks.same_accum_steps(
                "AccumModel",
                self.accum_steps,
                type(inner).__name__,
                inner.accum_steps,
            )
        model_checks.options_in_one_place(
            "AccumModel", type(inner).__name__, self.options
        )

    def config_of_fit(self) -> dict[str, Any]:
        """What a file of the model needs that no optimizer holds."""
        return {
            "remainder": self.remainder,
            "micro_batch_size": self.cutting.micro_batch_size,
            "loss_scope": self.cutting.loss_scope,
        }

    def get_config(self) -> dict[str, Any]:
        """What a file of the model needs, `accum_steps` left out."""
        return {
            **self.config_of_fit(),
            "nonfinite": self.options["nonfinite"],
            "accum_dtype": self.options["accum_dtype"],
            "gradient_transform": keras.saving.serialize_keras_object(
                self.options["gradient_transform"]
            ),
        }
