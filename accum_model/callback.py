"""AccumCallback: accumulation by one more item in the list given to `fit`.

For the time of `fit` it puts accumulation on the model, ends cycles where
epochs end, and adds what was done to the logs.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras

from accum_model import _keras_compat
from accum_model import attachment
from accum_model import batch_size
from accum_model import checks
from accum_model import epoch_boundary
from accum_model import guard
from accum_model import model_checks
from accum_model import nesting
from accum_model import noise_report
from accum_model import optimizer_checks
from accum_model import schedule
from accum_model.cut import cut_checks
from accum_model.cut.cutting import Cutting
from accum_model.model import AccumModel


class AccumCallback(epoch_boundary.EpochBoundary):
    """Makes `fit` update once per `accum_steps` batches, and logs it.

    Works on any compiled Keras model: functional, Sequential, subclassed, with
    a `train_step` of its own that calls `self.optimizer`. On an `AccumModel`,
    which accumulates anyway, it adds the logs. Its place in the list does not
    matter. After `fit`, however it ended, the model is as it was, with its own
    optimizer object and training step.

    When the first batch is seen it prints one line about the effective batch
    size. It adds to the epoch logs, and so to `History`, `CSVLogger` and
    `TensorBoard`:

    - `effective_batch_size`: mean rows per update of this epoch (NaN without
      an update),
    - `updates`: updates made in this epoch,
    - `gradient_norm`: mean over this epoch's updates of the global norm of the
      averaged gradient, before any clipping (NaN without an update). That of
      the last update can be read from `model.optimizer.gradient_norm`,
    - `gradient_noise_scale`, if asked for: see `noise_scale` below.

    Args:
        accum_steps: int >= 1, batches per update; or a schedule
            `{epoch: accum_steps}` with a key 0; or None for the model's own
            value. Defaults to None.
        remainder: What becomes of a cycle that an epoch leaves unfinished:
            `"flush"` applies it, divided by what was collected; `"carry"` goes
            on with it in the next epoch, and in the next `fit` with this same
            object; `"drop"` discards it. Defaults to None: the model's own, or
            `"flush"` where it has none.
        nonfinite: As for `AccumOptimizer`. Micro-batches and updates that were
            skipped appear in the epoch logs as `skipped_micro_batches` and
            `skipped_updates`, when there were any. Defaults to None.
        accum_dtype: As for `AccumOptimizer`. Defaults to None.
        gradient_transform: As for `AccumOptimizer`. Defaults to None.
        micro_batch_size: Rows per forward and backward pass inside a step, as
            for `AccumModel`: int >= 1, None or `"auto"`. What is in use appears
            in the epoch logs as `micro_batch_size`. Defaults to None: the
            model's own, or the whole batch.
        loss_scope: `"micro_batch"` or `"batch"`, as for `AccumModel`, together
            with `micro_batch_size`. Defaults to `"micro_batch"`.
        noise_scale: True to estimate the gradient noise scale: the rows per
            update beyond which more of them help little. It appears in the
            epoch logs as `gradient_noise_scale` (NaN where noise hides the
            gradient), and after training one line of advice is printed. It
            needs several micro-batches per update. Defaults to False.
        verbose: 0 or 1. With 1 the lines are printed. Defaults to 1.

    Raises:
        ValueError: If an argument is not one of those above. In `fit`: if the
            model is not compiled, or was given another `accum_steps`.
        TypeError: In `fit`, if the model is not a Keras 3 model.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((32, 4)), np.ones((32, 1))
        >>> history = model.fit(x, y, batch_size=8, verbose=0,
        ...                     callbacks=[AccumCallback(accum_steps=4)])
        Effective batch size: 8 rows per batch x 4 accum_steps x 1 replica = \
32 rows per update; 1 update per epoch.
        >>> history.history["updates"]
        [1]
    """

    def __init__(
        self,
        accum_steps: int | Mapping[int, int] | None = None,
        remainder: str | None = None,
        nonfinite: str | None = None,
        accum_dtype: str | None = None,
        gradient_transform: Callable[..., Any] | None = None,
        micro_batch_size: int | str | None = None,
        loss_scope: str = "micro_batch",
        noise_scale: bool = False,
        verbose: int = 1,
    ) -> None:
        super().__init__("flush" if remainder is None else remainder)
        self.accum_steps = checks.accum_steps_or_schedule(accum_steps)
        self.verbose = checks.verbose(verbose)
        self.noise_scale = checks.noise_scale(noise_scale)
        self._noise_report = noise_report.NoiseReport(self.verbose)
        self._options = {
            "nonfinite": checks.nonfinite(nonfinite),
            "accum_dtype": checks.accum_dtype(accum_dtype),
            "gradient_transform": checks.gradient_transform(gradient_transform),
        }
        self.cutting = Cutting(micro_batch_size, loss_scope)
        self.cutting.verbose = self.verbose
        self._given_cutting = self.cutting if self.cutting.cuts else None
        self._remainder_is_given = remainder is not None
        self._attachment: attachment.Attachment | None = None
        self._end_of_list: Callable[[], Any] | None = None

    def set_model(self, model: keras.Model) -> None:
        """Checks the model and takes the first place in the list."""
        model_checks.not_in_use(_keras_compat.is_called_twice(self), self)
        model_checks.keras_model("model", model)
        model_checks.compiled(model)
        optimizer_checks.scales_once("optimizer", model.optimizer)
        self._check_accum_steps(model)
        self._check_cutting(model)
        optimizer = nesting.find_in(model)
        if optimizer is not None:
            model_checks.options_in_one_place(
                "AccumCallback", type(optimizer).__name__, self._options
            )
        if self._end_of_list is not None:
            self._end_of_list()
        super().set_model(model)
        callback_list = _keras_compat.calling_callback_list(self)
        if callback_list is not None:
            model_checks.only_one(
                callback_list.callbacks, epoch_boundary.EpochBoundary
            )
            # First, to end the cycle of an epoch before the others look.
            callback_list.callbacks.remove(self)
            callback_list.callbacks.insert(0, self)
            if not isinstance(model, AccumModel):
                self._end_of_list = guard.watch_callbacks(
                    callback_list, self.abandon_fit
                )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts accumulation on the model."""
        self.close_fit()
        if isinstance(self.model, AccumModel) and not self._remainder_is_given:
            self.remainder = self.model.remainder
        if self._attachment is None or not self._attachment.fits(self.model):
            self._attachment = attachment.attach(
                self.model,
                self._first_accum_steps(),
                self._needs_buffers(),
                self._options,
                self._given_cutting,
                self.noise_scale,
            )
        self._attachment.attach()
        self._noise_report.begin_fit()
        self.cutting = self._attachment.cutting
        if not self._attachment.fit_cleans_up:
            self._watch("train_function")
        super().on_train_begin(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the cycle before validation, and watches over it."""
        super().on_test_begin(logs)
        if self._is_attached() and not self._attachment.fit_cleans_up:
            self._test_function = self.model.test_function
            self._watch("test_function")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops watching over the validation."""
        if self._is_attached() and not self._attachment.fit_cleans_up:
            self.model.test_function = self._test_function

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the schedule's value and notes where counters stand."""
        optimizer = self.accum_optimizer
        if isinstance(self.accum_steps, dict):
            optimizer.accum_steps = schedule.value_at(self.accum_steps, epoch)
        self._updates_before = int(optimizer.iterations.numpy())
        self._skipped_before = self._skipped()
        self._norms_before = float(optimizer.count_rows().norm_sum.numpy())
        self._rows_before = int(optimizer.count_rows().num_applied.numpy())
        self._noise_report.begin_epoch(optimizer.count_rows())
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Ends the cycle and writes the logs."""
        super().on_epoch_end(epoch, logs)
        if logs is None:
            return
        optimizer = self.accum_optimizer
        rows = int(optimizer.count_rows().num_applied.numpy())
        updates = int(optimizer.iterations.numpy()) - self._updates_before
        rows -= self._rows_before
        logs["effective_batch_size"] = (
            rows / updates if updates else float("nan")
        )
        logs["updates"] = updates
        norms = float(optimizer.count_rows().norm_sum.numpy())
        norms -= self._norms_before
        logs["gradient_norm"] = norms / updates if updates else float("nan")
        self._noise_report.end_epoch(optimizer.count_rows(), logs)
        if self.cutting.cuts:
            logs["micro_batch_size"] = self.cutting.rows_in_use
        for name, number in self._skipped().items():
            if number > self._skipped_before[name]:
                logs[name] = number - self._skipped_before[name]

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Takes accumulation off the model."""
        self._noise_report.end_fit()
        self.close_fit()

    def on_first_batch(self) -> None:
        """Prints the line about the effective batch size."""
        super().on_first_batch()
        if self.verbose:
            print(self._first_line(), flush=True)

    def close_fit(self) -> None:
        """Puts the model back as it was."""
        super().close_fit()
        if self._attachment is not None:
            self._attachment.detach()

    def abandon_fit(self) -> None:
        """Puts the model back after a failure, in the middle of an epoch."""
        if self._is_attached():
            # Only a cycle that is carried belongs to the next `fit` too.
            is_carried = self.remainder == "carry"
            self._attachment.optimizer.partial_cycle_is_stale = not is_carried
            self.close_fit()

    def _skipped(self):
        optimizer = self.accum_optimizer
        return {
            "skipped_micro_batches": optimizer.num_skipped_micro_batches,
            "skipped_updates": optimizer.num_skipped_updates,
        }

    def _is_attached(self):
        return self._attachment is not None and self._attachment.is_attached

    def _watch(self, name):
        function = getattr(self.model, name)
        setattr(self.model, name, guard.guarded(function, self.abandon_fit))

    def _first_accum_steps(self):
        if isinstance(self.accum_steps, dict):
            return self.accum_steps[0]
        return self.accum_steps

    def _needs_buffers(self):
        if isinstance(self.accum_steps, dict):
            return max(self.accum_steps.values()) > 1
        return False

    def _check_accum_steps(self, model):
        if nesting.find_in(model) is None:
            optimizer_checks.accumulates_once("optimizer", model.optimizer)
        if self.accum_steps is None:
            return
        values = [self.accum_steps]
        if isinstance(self.accum_steps, dict):
            values = list(self.accum_steps.values())
        optimizer = nesting.find(model.optimizer)
        cut_checks.updates_every_step(model.optimizer, max(values))
        if isinstance(model, AccumModel):
            other, second = model.given_accum_steps, "AccumModel"
        elif optimizer is not None:
            # 1 is what an optimizer has when nothing was said.
            other = optimizer.accum_steps if optimizer.accum_steps > 1 else None
            second = type(optimizer).__name__
        else:
            return
        if other is not None and other not in values:
            model_checks.same_accum_steps(
                "AccumCallback", self.accum_steps, second, other
            )

    def _check_cutting(self, model):
        given = self._given_cutting
        if given is None:
            return
        cut_checks.no_own_train_step(model, given.micro_batch_size)
        if isinstance(model, AccumModel) and model.cutting.cuts:
            for name in ("micro_batch_size", "loss_scope"):
                cut_checks.same_setting(
                    name,
                    "AccumCallback",
                    getattr(given, name),
                    "AccumModel",
                    getattr(model, name),
                )

    def _first_line(self):
        optimizer = self.accum_optimizer
        counts = optimizer.count_rows()
        seen = int(counts.num_applied.numpy() + counts.num_pending.numpy())
        batches = optimizer.num_micro_batches - self._batches_before
        seen -= self._rows_before
        replicas = optimizer.replicas.count
        rows = f"{seen // batches // replicas}"
        if seen % (batches * replicas):
            # Several batches in one execution, the last of them short.
            rows = f"about {max(1, round(seen / batches / replicas))}"
        k = optimizer.accum_steps
        total = batch_size.effective_batch_size(
            max(1, round(seen / batches)), k
        )
        text = (
            f"Effective batch size: {rows} rows per batch x {k} accum_steps x "
            f"{replicas} replica{'s' if replicas > 1 else ''} = {total} rows "
            "per update"
        )
        steps = (self.params or {}).get("steps")
        if steps:
            updates = batch_size.updates_per_epoch(steps, k, self.remainder)
            text += f"; {updates} update{'s' if updates != 1 else ''} per epoch"
        if self.cutting.cuts:
            rows = self.cutting.rows_in_use
            text += f"; micro-batches of {rows} row{'s' if rows > 1 else ''}"
        return text + "."
