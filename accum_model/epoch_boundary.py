"""What happens where epochs end and cycles do not.

`flush` applies what a partial cycle has collected, `drop` discards it and
`carry` lets the cycle go on in the next epoch.
"""

import contextlib
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from accum_model import batch_statistics
from accum_model import checks
from accum_model import freezing
from accum_model import nesting
from accum_model.cut.cutting import Cutting
from accum_model.optimizer import AccumOptimizer


class EpochBoundary(keras.callbacks.Callback):
    """Ends the partial cycle of an epoch before anything looks at the model.

    That is before validation, and before `on_epoch_end` of the callbacks that
    come later in the list: it belongs first.

    Args:
        remainder: `"flush"`, `"carry"` or `"drop"`.

    Attributes:
        cutting: How batches are cut inside the step.

    Raises:
        ValueError: If `remainder` is unknown.
    """

    # Nothing is done per batch, so Keras may dispatch batch hooks as it likes.
    async_safe = True

    def __init__(self, remainder: str = "flush") -> None:
        super().__init__()
        self.remainder = checks.remainder(remainder)
        self.cutting = Cutting()
        self._epoch_is_open = False
        self._fit_is_open = False
        self._has_seen_batch = False
        self._has_warned = False
        self._first_step: tuple[Callable[..., Any], ...] | None = None

    @property
    def accum_optimizer(self) -> AccumOptimizer | None:
        """The accumulating optimizer that trains the model, if there is one."""
        return nesting.find_in(self.model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Discards what does not belong to this `fit`."""
        self._epoch_is_open = False
        self._fit_is_open = True
        self._has_seen_batch = False
        self._has_warned = False
        freezing.warn_of_change(self.model)
        optimizer = self.accum_optimizer
        if optimizer is not None and optimizer.partial_cycle_is_stale:
            optimizer.reset()

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Opens the epoch."""
        self._epoch_is_open = True
        optimizer = self.accum_optimizer
        if optimizer is None:
            return
        self._batches_before = optimizer.num_micro_batches
        self._warn_if_never_full((self.params or {}).get("steps"))
        if optimizer.accum_steps > 1:
            batch_statistics.warn_once(
                self.model, f"accum_steps={optimizer.accum_steps}"
            )
        if not self._has_seen_batch:
            self._watch_first_batch()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the epoch before its validation."""
        # Keras hands its own list of callbacks to the validation inside `fit`,
        # which comes after the last batch of the epoch.
        self._close_epoch()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Closes the epoch if no validation has, and logs a size found."""
        self._close_epoch()
        if logs is not None and self.cutting.is_auto:
            logs["micro_batch_size"] = self.cutting.rows_in_use

    def close_fit(self) -> None:
        """Called when `fit` is over, however it ended."""
        self._fit_is_open = False
        if self._first_step is not None:
            first_step, step = self._first_step
            self._first_step = None
            if self.model.train_function is first_step:  # There was no batch.
                self.model.train_function = step

    @property
    def must_discard(self) -> bool:
        """True when a failure now leaves a cycle that nobody goes on with."""
        return self._fit_is_open and self.remainder != "carry"

    def on_first_batch(self) -> None:
        """Called once per `fit`, after the first call of the training step.

        Raises:
            RuntimeError: If the step did not apply gradients with the model's
                optimizer, so that nothing accumulates.
        """
        optimizer = self.accum_optimizer
        if optimizer is None or optimizer.accum_steps == 1:
            return
        if not self.model.trainable_weights:
            return  # Keras says so itself.
        if optimizer.num_micro_batches == self._batches_before:
            raise RuntimeError(
                "Nothing accumulates because train_step of "
                f"{type(self.model).__name__} did not call self.optimizer. "
                f"Received: accum_steps={optimizer.accum_steps!r}. Give each "
                "optimizer that train_step does call to "
                "AccumOptimizer(optimizer, accum_steps) instead."
            )

    def _watch_first_batch(self):
        # Not by a batch hook: that would come after the progress bar, or in
        # another thread.
        model, step = self.model, self.model.train_function

        def first_step(iterator):
            model.train_function = step
            logs = step(iterator)
            self._has_seen_batch = True
            self.on_first_batch()
            return logs

        model.train_function = first_step
        self._first_step = (first_step, step)

    def _close_epoch(self):
        if not self._epoch_is_open:
            return
        self._epoch_is_open = False
        optimizer = self.accum_optimizer
        if optimizer is None:
            return
        self._warn_if_never_full(
            optimizer.num_micro_batches - self._batches_before
        )
        if self.remainder == "flush":
            optimizer.flush()
        elif self.remainder == "drop":
            optimizer.reset()

    def _warn_if_never_full(self, num_batches):
        accum_steps = self.accum_optimizer.accum_steps
        if self._has_warned or not num_batches or accum_steps <= num_batches:
            return
        self._has_warned = True
        consequence = {
            "flush": "each update uses one epoch's batches",
            "carry": "updates are more than an epoch apart",
            "drop": "no update is ever made",
        }[self.remainder]
        warnings.warn(
            f"accum_steps={accum_steps} exceeds the {num_batches} batches of "
            f'an epoch: with remainder="{self.remainder}", {consequence}.',
            stacklevel=2,
        )


@contextlib.contextmanager
def put_first(callbacks: Any, model: keras.Model) -> Iterator[Any]:
    """Puts an `EpochBoundary` first for one `fit`, unless there is one.

    Args:
        callbacks: As given to `fit` of `model`.
        model: An accumulating model.
    """
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    given = callbacks.callbacks if is_list else callbacks
    given = keras.tree.flatten(given) if given is not None else []
    for callback in given:
        if isinstance(callback, EpochBoundary):
            boundary = callback
            break
    else:
        boundary = EpochBoundary(model.remainder)
        boundary.cutting = model.cutting
        if is_list:
            boundary.set_model(model)
            boundary.set_params(callbacks.params)
            callbacks.callbacks.insert(0, boundary)
        else:
            callbacks = [boundary, *given]
    try:
        yield callbacks
    except BaseException:
        if boundary.must_discard:
            model.reset_accumulation()
        raise
    finally:
        boundary.close_fit()
        if is_list and boundary not in given:
            callbacks.callbacks.remove(boundary)
