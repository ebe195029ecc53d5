"""AccumModel: a Keras model whose `fit` updates once per `accum_steps` batches.

`compile` puts the optimizer into an `AccumOptimizer`, which owns everything
that accumulates; the model only passes it the weight of each micro-batch and
sees to the ends of epochs.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from accum_model import _keras_compat
from accum_model import call_checks
from accum_model import checks
from accum_model import compiling
from accum_model import distributed_step
from accum_model import epoch_boundary
from accum_model import loading
from accum_model import model_checks
from accum_model import nesting
from accum_model import optimizer_chain
from accum_model import optimizer_checks
from accum_model import train_step
from accum_model import variant
from accum_model.cut import cut_checks
from accum_model.cut.cutting import Cutting
from accum_model.optimizer import AccumOptimizer
from accum_model.settings import Settings


@keras.saving.register_keras_serializable(package="accum_model")
class AccumModel(keras.Model):
    """A Keras model that accumulates gradients over batches.

    Made from tensors, by subclassing, or around an existing model with `wrap`.
    The update made after `accum_steps` batches is that of one batch of all
    their rows. Everything else is `keras.Model`.

    A subclass may have a `train_step` of its own: what it passes to
    `self.optimizer.apply_gradients` accumulates too, and its loss is taken to
    be a mean over the rows of the batch.

    Args:
        *args: As for `keras.Model`: `inputs` and `outputs`, or nothing in a
            subclass.
        accum_steps: int >= 1. Batches per update. Defaults to 1, which is
            plain Keras.
        remainder: What becomes of a cycle that an epoch leaves unfinished:
            `"flush"` applies it, divided by what was collected; `"carry"` goes
            on with it in the next epoch; `"drop"` discards it. Defaults to
            `"flush"`.
        nonfinite: As for `AccumOptimizer`. Defaults to None.
        accum_dtype: As for `AccumOptimizer`. Defaults to None.
        gradient_transform: As for `AccumOptimizer`. Defaults to None.
        micro_batch_size: Rows per forward and backward pass inside a step: int
            >= 1, or None for the whole batch, or `"auto"` to start with the
            whole batch and halve it when memory runs out. The step stays that
            of the batch: one update, the same logs. Defaults to None.
        loss_scope: What one loss is taken over where batches are cut:
            `"micro_batch"`, right for losses that are sums over rows; or
            `"batch"`, right for any loss, at the price of a second forward
            pass. Defaults to `"micro_batch"`.
        **kwargs: As for `keras.Model`, such as `name`.

    Attributes:
        accum_steps: Batches per update. May be set at any time and holds from
            the next cycle on.
        remainder: See above. May be set between calls of `fit`.
        micro_batch_size: See above. May be set between calls of `fit`.
        loss_scope: See above. May be set between calls of `fit`.

    Raises:
        TypeError: If `gradient_transform` is not callable.
        ValueError: If `accum_steps` is not an int >= 1; if `remainder`,
            `nonfinite`, `accum_dtype`, `micro_batch_size` or `loss_scope` is
            unknown; or if `micro_batch_size` is given to a model that has a
            `train_step` of its own.

    Example:
        >>> import keras
        >>> inputs = keras.Input((4,))
        >>> outputs = keras.layers.Dense(1)(inputs)
        >>> model = AccumModel(inputs, outputs, accum_steps=4)
        >>> model.compile("sgd", "mse")
        >>> model.optimizer.accum_steps
        4
    """

    def __init__(
        self,
        *args: Any,
        accum_steps: int | None = checks.NOT_GIVEN,
        remainder: str = "flush",
        nonfinite: str | None = None,
        accum_dtype: str | None = None,
        gradient_transform: Callable[..., Any] | None = None,
        micro_batch_size: int | str | None = None,
        loss_scope: str = "micro_batch",
        **kwargs: Any,
    ) -> None:
        call_checks.model_positions(args)
        settings = Settings(
            accum_steps,
            remainder,
            nonfinite,
            accum_dtype,
            gradient_transform,
            micro_batch_size,
            loss_scope,
        )
        cut_checks.no_own_train_step(self, micro_batch_size)
        functional = _keras_compat.functional_class()
        if _is_functional(args, kwargs) and not isinstance(self, functional):
            # Before Keras would rewrite the bases of AccumModel, and with them
            # those of every other subclass.
            call_checks.functional_keywords(kwargs)
            self.__class__ = variant.of(AccumModel, type(self), functional)
        super().__init__(*args, **kwargs)
        self._accum_settings = settings

    @classmethod
    def wrap(
        cls,
        model: keras.Model,
        accum_steps: int = checks.NOT_GIVEN,
        remainder: str = "flush",
        nonfinite: str | None = None,
        accum_dtype: str | None = None,
        gradient_transform: Callable[..., Any] | None = None,
        micro_batch_size: int | str | None = None,
        loss_scope: str = "micro_batch",
    ) -> "AccumModel":
        """Returns an accumulating model around the layers of `model`.

        Layers and variables are shared, so both models always have the same
        weights. If `model` is compiled, so is the result, with the same
        optimizer, loss and metrics.

        Args:
            model: Functional, Sequential or subclassed model, compiled or not.
            accum_steps: int >= 1. Batches per update. Defaults to 1.
            remainder: `"flush"`, `"carry"` or `"drop"`. Defaults to `"flush"`.
            nonfinite: As for `AccumOptimizer`. Defaults to None.
            accum_dtype: As for `AccumOptimizer`. Defaults to None.
            gradient_transform: As for `AccumOptimizer`. Defaults to None.
            micro_batch_size: As for `AccumModel`. Defaults to None.
            loss_scope: As for `AccumModel`. Defaults to `"micro_batch"`.

        Raises:
            TypeError: If `model` is not a Keras 3 model.
            ValueError: If `model` is an `AccumModel`, or another argument is
                not one of those above.

        Example:
            >>> import keras
            >>> model = keras.Sequential([keras.layers.Dense(1)])
            >>> model.compile("adam", "mse")
            >>> model = AccumModel.wrap(model, accum_steps=4)
            >>> print(model.accum_steps, model.loss)
            4 mse
        """
        model = model_checks.keras_model("model", model)
        settings = Settings(
            accum_steps,
            remainder,
            nonfinite,
            accum_dtype,
            gradient_transform,
            micro_batch_size,
            loss_scope,
        )
        model_checks.not_wrapped(model, AccumModel)
        cut_checks.no_own_train_step(model, micro_batch_size)
        if model.compiled:
            settings.check_optimizer(model.optimizer)
        accum_class = variant.accum_class_of(cls)
        view = _keras_compat.view_of(
            model, variant.of(AccumModel, accum_class, type(model))
        )
        vars(view)["_accum_settings"] = settings
        if model.compiled:
            compiling.compile_like(view, model, settings)
        return view

    @property
    def accum_steps(self) -> int:
        """Batches per update."""
        optimizer = nesting.find_in(self)
        if optimizer is not None:
            return optimizer.accum_steps
        return self._accum_settings.accum_steps

    @accum_steps.setter
    def accum_steps(self, accum_steps: int) -> None:
        accum_steps = checks.accum_steps(accum_steps)
        self._accum_settings.give(accum_steps)
        optimizer = nesting.find_in(self)
        if optimizer is None:
            return
        if accum_steps > 1 and not optimizer.is_accumulating:
            optimizer.start_accumulating()
            self.renew_train_function()
        optimizer.accum_steps = accum_steps

    @property
    def given_accum_steps(self) -> int | None:
        """`accum_steps`, or None where it was left to its default."""
        return self.accum_steps if self._accum_settings.is_given else None

    @property
    def remainder(self) -> str:
        """What becomes of a partial cycle at the end of an epoch."""
        return self._accum_settings.remainder

    @remainder.setter
    def remainder(self, remainder: str) -> None:
        self._accum_settings.remainder = checks.remainder(remainder)

    @property
    def micro_batch_size(self) -> int | str | None:
        """Rows per forward and backward pass inside a step."""
        return self._accum_settings.cutting.micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, micro_batch_size: int | str | None) -> None:
        self.use_cutting(Cutting(micro_batch_size, self.loss_scope))

    @property
    def loss_scope(self) -> str:
        """What one loss is taken over."""
        return self._accum_settings.cutting.loss_scope

    @loss_scope.setter
    def loss_scope(self, loss_scope: str) -> None:
        self.use_cutting(Cutting(self.micro_batch_size, loss_scope))

    def flush(self) -> None:
        """Applies a partial cycle now, divided by what it has collected."""
        optimizer = nesting.find_in(self)
        if optimizer is not None:
            optimizer.flush()

    def reset_accumulation(self) -> None:
        """Discards a partial cycle."""
        optimizer = nesting.find_in(self)
        if optimizer is not None:
            optimizer.reset()

    def micro_batch_weight(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> Any:
        """The weight of a batch, to be overridden: its loss's denominator.

        Needed only where the loss is a mean over something that the package
        cannot see, such as in a `compute_loss` of the model's own, which is
        taken to be a mean over rows.

        Args:
            x: Inputs of the batch.
            y: Targets of the batch, or None.
            y_pred: Outputs of the model.
            sample_weight: Sample weights of the batch, or None.

        Returns:
            Scalar >= 0, a number or a tensor.
        """
        raise NotImplementedError

    micro_batch_weight.is_default = True

    # What Keras calls.

    def compile(
        self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any
    ) -> None:
        """As `keras.Model.compile`, with the optimizer accumulating.

        Args:
            optimizer: As for Keras. An `AccumOptimizer` is used as it is.
            *args: As for `keras.Model.compile`.
            **kwargs: As for `keras.Model.compile`.

        Raises:
            ValueError: If model and optimizer were given different values of
                `accum_steps`.
        """
        call_checks.no_settings("compile", kwargs)
        if optimizer is not None:
            optimizer = optimizer_checks.optimizer("optimizer", optimizer)
            self._accum_settings.check_optimizer(optimizer)
        model_checks.strategy(self.distribute_strategy)
        is_outermost = isinstance(optimizer, AccumOptimizer)
        plain = optimizer.inner_optimizer if is_outermost else optimizer
        # Keras puts the plain one into a LossScaleOptimizer if the precision
        # asks for it; accumulation goes around both.
        scaling = keras.optimizers.LossScaleOptimizer
        if optimizer_chain.find(plain, scaling) is not None:
            # Keras looks at the outermost optimizer only, and adds another.
            kwargs["auto_scale_loss"] = False
        super().compile(plain, *args, **kwargs)
        if self.optimizer is None:
            return
        if is_outermost:
            optimizer.inner_optimizer = self.optimizer
            _keras_compat.set_optimizer(self, optimizer)
        compiling.accumulate_outermost(self, self._accum_settings)

    def train_step(self, data: Any) -> Any:
        """Trains on one batch; the one that ends a cycle updates."""
        return train_step.run(self, super().train_step, self.cutting, data)

    # Models that have this one, and none of their own, run Keras's.
    train_step.runs_keras = True

    def make_train_function(self, force: bool = False) -> Any:
        """As in Keras, for a `train_step` of the subclass's own too."""
        return train_step.compile_into(
            self, super().make_train_function, force, self.cutting
        )

    def make_test_function(self, force: bool = False) -> Any:
        """As in Keras, on several machines too."""
        if not distributed_step.are_needed(self.distribute_strategy):
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = distributed_step.make(self, self.test_step)
        return self.test_function

    @property
    def cutting(self) -> Cutting:
        """How batches are cut inside the step."""
        return self._accum_settings.cutting

    def use_cutting(self, cutting: Cutting) -> None:
        """Cuts batches in another way from the next step on."""
        cut_checks.no_own_train_step(self, cutting.micro_batch_size)
        self._accum_settings.cutting = cutting
        self.renew_train_function()

    def renew_train_function(self) -> None:
        """Has the training step compiled again, if it is compiled."""
        if self.train_function is not None:
            self.make_train_function(force=True)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """As `keras.Model.fit`; epochs end as `remainder` says.

        Where `fit` raises, a partial cycle is discarded unless it is carried.
        """
        call_checks.no_settings("fit", kwargs)
        with (
            self._building(),
            epoch_boundary.put_first(callbacks, self) as callbacks,
        ):
            return super().fit(
                x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs
            )

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.evaluate`."""
        with self._building():
            return super().evaluate(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.train_on_batch`: one micro-batch."""
        logs = super().train_on_batch(*args, **kwargs)
        optimizer = nesting.find_in(self)
        if optimizer is not None:
            optimizer.partial_cycle_is_stale = True
        return logs

    def _building(self):
        if self.distribute_strategy.num_replicas_in_sync > 1:
            return _keras_compat.building_on_replicas(self)
        return contextlib.nullcontext()

    # Saving.

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """As in Keras; a file that does not fit changes nothing."""
        optimizer = nesting.find_in(self)
        had_buffers = optimizer is not None and optimizer.is_accumulating
        with loading.all_or_nothing(self):
            super().load_weights(filepath, *args, **kwargs)
        if optimizer is not None and optimizer.is_accumulating != had_buffers:
            self.renew_train_function()

    def get_compile_config(self) -> dict[str, Any]:
        """As in Keras, with the accumulating optimizer."""
        config = super().get_compile_config()
        if config and self.optimizer is not None:
            config["optimizer"] = keras.saving.serialize_keras_object(
                self.optimizer
            )
            if not variant.is_variant(type(self)):
                # Others have it in `get_config`, and are compiled by Keras's
                # own method when they are cloned.
                config |= self._accum_settings.config_of_fit()
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """As in Keras, with the accumulating optimizer."""
        config = keras.saving.deserialize_keras_object(dict(config))
        self._accum_settings.take_over(config)
        self.compile(**config)
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> "AccumModel":
        """Makes a model from what `get_config` returned."""
        if "model" not in config:
            return super().from_config(config, custom_objects)
        config = dict(config)
        load = functools.partial(
            keras.saving.deserialize_keras_object, custom_objects=custom_objects
        )
        model = load(config.pop("model"))
        transform = load(config.pop("gradient_transform", None))
        return cls.wrap(model, gradient_transform=transform, **config)


def _is_functional(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True for the arguments of `keras.Model(inputs, outputs)`."""
    return len(args) == 2 or "outputs" in kwargs
