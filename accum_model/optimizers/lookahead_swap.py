"""A callback that evaluates and saves with the slow weights of Lookahead."""

from typing import Any

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import epoch_boundary
from accum_model import model_checks
from accum_model import optimizer_chain
from accum_model.optimizers.lookahead import Lookahead


class LookaheadSwap(keras.callbacks.Callback):
    """Puts the slow weights into the model where it is looked at.

    For the time of a validation, and from the end of each epoch to the start
    of the next, the model holds the slow weights: `ModelCheckpoint`,
    `EarlyStopping` and what else looks at the end of an epoch see those,
    wherever they stand in the list of callbacks. Training goes on with the
    fast weights. A file written then resumes from the slow weights.

    It needs memory for one more copy of the weights.

    Raises:
        ValueError: When training starts, if the model is not compiled with a
            `Lookahead`, alone or inside other optimizers.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(Ranger(), "mse")
        >>> x, y = np.ones((4, 2)), np.ones((4, 1))
        >>> _ = model.fit(x, y, validation_data=(x, y), verbose=0,
        ...               callbacks=[LookaheadSwap()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._fast_weights: list[tf.Tensor] | None = None
        self._is_testing = False

    def set_model(self, model: keras.Model) -> None:
        """Checks the model; goes before callbacks that look at weights."""
        model_checks.keras_model("model", model)
        super().set_model(model)
        self._lookahead()
        callback_list = _keras_compat.calling_callback_list(self)
        if callback_list is None:
            return
        callbacks = callback_list.callbacks
        callbacks.remove(self)
        # After what ends the cycle of an epoch, which moves the weights.
        boundaries = [
            place + 1
            for place, each in enumerate(callbacks)
            if isinstance(each, epoch_boundary.EpochBoundary)
        ]
        callbacks.insert(max(boundaries, default=0), self)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets what a `fit` that failed has left."""
        self._fast_weights = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the slow weights in."""
        self._is_testing = self._fast_weights is None
        if self._is_testing:
            self._swap_in()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the fast weights back."""
        if self._is_testing:
            self._is_testing = False
            self._swap_out()

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Gives the fast weights back."""
        self._swap_out()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Puts the slow weights in."""
        if self._fast_weights is None:
            self._swap_in()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leaves the slow weights in, as `Lookahead` does."""
        self._fast_weights = None

    def _lookahead(self):
        optimizer = getattr(self.model, "optimizer", None)
        for each in optimizer_chain.chain(optimizer):
            if isinstance(each, Lookahead):
                return each
        raise ValueError(
            "`LookaheadSwap` needs a model that is compiled with a Lookahead "
            f"or Ranger. Received: model={self.model.name!r} with an optimizer "
            f"of type {type(optimizer).__name__}. Leave the callback out, or "
            "compile with Lookahead(optimizer)."
        )

    def _swap_in(self):
        lookahead = self._lookahead()
        if lookahead.built:
            self._fast_weights = [
                tf.identity(tf.convert_to_tensor(variable))
                for variable in lookahead.fast_weights
            ]
            lookahead.assign_slow_weights()

    def _swap_out(self):
        if self._fast_weights is None:
            return
        for variable, value in zip(
            self._lookahead().fast_weights, self._fast_weights, strict=True
        ):
            variable.assign(value)
        self._fast_weights = None
