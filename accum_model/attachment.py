"""Accumulation on a model for the time of one `fit`, and the way back.

A plain model receives an accumulating optimizer around its own and a training
step that passes weights to it; an `AccumModel` has both and only receives the
settings. `detach` leaves the model as it was.
"""

from typing import Any

import keras

from accum_model import _keras_compat
from accum_model import nesting
from accum_model import train_step
from accum_model.cut.cutting import Cutting
from accum_model.model import AccumModel
from accum_model.optimizer import AccumOptimizer
from accum_model.replicas import Replicas


def attach(
    model: keras.Model,
    accum_steps: int | None,
    needs_buffers: bool,
    options: dict[str, Any],
    cutting: Cutting | None,
    noise_scale: bool = False,
) -> "Attachment":
    """Makes `model` accumulate until the attachment is detached.

    Args:
        model: A compiled model.
        accum_steps: int >= 1, or None for the model's own value.
        needs_buffers: True to make buffers although `accum_steps` is 1.
        options: Other arguments of the accumulating optimizer, by name.
        cutting: How batches are cut, or None for the model's own way.
        noise_scale: True to estimate the gradient noise scale.
    """
    is_accum_model = isinstance(model, AccumModel)
    kind = AccumModelAttachment if is_accum_model else PlainAttachment
    with Replicas(model.distribute_strategy).variables():
        return kind(
            model, accum_steps, needs_buffers, options, cutting, noise_scale
        )


class Attachment:
    """The state of one model, before and during `fit`.

    Attributes:
        optimizer: The accumulating optimizer, also once detached.
        is_attached: False once the model is as it was.
        fit_cleans_up: True when the model's own `fit` detaches on failure.
    """

    fit_cleans_up = False

    def __init__(
        self,
        model: keras.Model,
        accum_steps: int | None,
        needs_buffers: bool,
        options: dict[str, Any],
        cutting: Cutting | None,
        noise_scale: bool,
    ) -> None:
        self._model = model
        self._cutting = cutting
        self._options = options
        self._noise_scale = noise_scale
        self._accum_steps = accum_steps
        self._needs_buffers = needs_buffers
        self._identity = _identity(model)
        self.optimizer: AccumOptimizer = self._take_optimizer()
        self.is_attached = False

    def fits(self, model: keras.Model) -> bool:
        """True when it can serve `model` again: nothing was exchanged."""
        return self._model is model and self._identity == _identity(model)

    def attach(self) -> None:
        """Puts accumulation on. Does nothing when it is on."""
        if not self.is_attached:
            self.is_attached = True
            with Replicas(self._model.distribute_strategy).variables():
                self._attach()

    def detach(self) -> None:
        """Puts everything back. Does nothing when it is back."""
        if self.is_attached:
            self.is_attached = False
            self._detach()

    def _configure(self) -> bool:
        """Applies the settings; True when the step must be compiled anew."""
        optimizer = self.optimizer
        before = _what_is_compiled(optimizer)
        optimizer.count_rows().estimate_noise(self._noise_scale)
        if self._needs_buffers or (self._accum_steps or 1) > 1:
            optimizer.start_accumulating()
        if self._accum_steps is not None:
            optimizer.accum_steps = self._accum_steps
        return before != _what_is_compiled(optimizer)

    @property
    def cutting(self) -> Cutting:
        """How batches are cut while it is attached."""
        raise NotImplementedError

    def _take_optimizer(self) -> AccumOptimizer:
        raise NotImplementedError

    def _attach(self) -> None:
        raise NotImplementedError

    def _detach(self) -> None:
        raise NotImplementedError


def _what_is_compiled(optimizer: AccumOptimizer) -> tuple[bool, ...]:
    return (
        optimizer.is_accumulating,
        optimizer.counts_rows,
        optimizer.estimates_noise,
    )


def _identity(model: keras.Model) -> tuple[object, ...]:
    """Changes when `model` is compiled anew, or its parts are exchanged."""
    return (
        _keras_compat.compile_record(model),
        model.optimizer,
        *(id(variable) for variable in model.trainable_variables),
    )


class AccumModelAttachment(Attachment):
    """Settings on a model that accumulates by itself."""

    fit_cleans_up = True

    def _take_optimizer(self):
        return nesting.find(self._model.optimizer)

    @property
    def cutting(self) -> Cutting:
        """The callback's way of cutting, or the model's."""
        return self._cutting or self._model.cutting

    def _attach(self):
        self._steps_before = self.optimizer.accum_steps
        self._cutting_before = self._model.cutting
        is_changed = self._configure()
        if self.cutting is not self._cutting_before:
            self._model.use_cutting(self.cutting)
        elif is_changed:
            self._model.renew_train_function()

    def _detach(self):
        self.optimizer.accum_steps = self._steps_before
        if self._cutting is not None and self._cutting is self._model.cutting:
            # Unless it was set during `fit`.
            self._model.use_cutting(self._cutting_before)


class PlainAttachment(Attachment):
    """Optimizer and training step on a model that knows nothing of it."""

    _compiled_step = None

    @property
    def cutting(self) -> Cutting:
        """The callback's way of cutting, or none."""
        if self._cutting is None:
            self._cutting = Cutting()
        return self._cutting

    def _take_optimizer(self):
        found = nesting.find(self._model.optimizer)
        if found is not None:
            return found
        return AccumOptimizer(
            self._model.optimizer, self._accum_steps or 1, **self._options
        )

    def _attach(self):
        model = self._model
        self._optimizer_before = model.optimizer
        self._function_before = model.train_function
        self._steps_before = self.optimizer.accum_steps
        self._nesting = None
        if nesting.find(model.optimizer) is not None:
            self._nesting = nesting.Nesting(model.optimizer, 1)
        is_changed = self._configure()
        _keras_compat.set_optimizer(model, self.optimizer)
        self._recorded = _keras_compat.record_optimizer(model, self.optimizer)
        if is_changed or self._compiled_step is None:
            train_step.compile_into(
                model, model.make_train_function, True, self.cutting
            )
            self._compiled_step = model.train_function
        model.train_function = self._compiled_step

    def _detach(self):
        model = self._model
        self._recorded.close()
        if self._nesting is not None:
            self._nesting.undo()
            self.optimizer.accum_steps = self._steps_before
        _keras_compat.set_optimizer(model, self._optimizer_before)
        model.train_function = self._function_before
