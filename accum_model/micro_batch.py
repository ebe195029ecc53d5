"""What a training step knows of its micro-batch, for the optimizer to use.

The step's own code does not pass it on: `AccumOptimizer.apply` finds it where
the step was started.
"""

import contextlib
import contextvars
import inspect
import types
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import checks
from accum_model import loss_terms
from accum_model import shadow

# The micro-batch that each optimizer is given, by id. Replicas run in threads.
_presented: contextvars.ContextVar[Mapping[int, "MicroBatch"]] = (
    contextvars.ContextVar("micro_batches", default=types.MappingProxyType({}))
)


def present(optimizer: keras.optimizers.Optimizer) -> "MicroBatch | None":
    """The micro-batch whose gradients `optimizer` is given now, if known."""
    return _presented.get().get(id(optimizer))


@contextlib.contextmanager
def presented(
    optimizer: keras.optimizers.Optimizer, batch: "MicroBatch"
) -> Iterator[None]:
    """A block in which gradients given to `optimizer` are of `batch`."""
    token = _presented.set({**_presented.get(), id(optimizer): batch})
    try:
        yield
    finally:
        _presented.reset(token)


class MicroBatch:
    """The weight of one micro-batch.

    Args:
        num_rows: int64 scalar, rows of the micro-batch.

    Attributes:
        num_rows: As given.
        weight: Scalar: the denominator of the compiled loss, as far as it is
            known; else the rows.
        num_skipped: How many parts of it were left out because their gradients
            were not finite.
        is_sum: True when the loss is a sum, which is not to be divided.
        has_mixed_denominators: True when several outputs are divided by
            different things, which no single weight can do justice to.
        terms: The losses of the outputs, as far as they can be seen.
        noise_sums: Where it is cut: sums over its parts for the gradient noise
            scale, if anyone asks for it.
    """

    def __init__(self, num_rows: tf.Tensor) -> None:
        self.num_rows = num_rows
        self.weight: tf.Tensor = num_rows
        self.num_skipped: tf.Tensor | int = 0
        self.is_sum = False
        self.has_mixed_denominators = False
        self.terms: Sequence[loss_terms.Term] = ()
        self.noise_sums: tf.Tensor | None = None
        self._loss: tf.Tensor | None = None
        self._added: list[tf.Tensor] = []

    def watch(
        self, model: keras.Model, factor: loss_terms.Factor | None = None
    ) -> Any:
        """A block in which `model.compute_loss` tells the weight.

        A `compute_loss` of the model's own counts rows, or what
        `micro_batch_weight` of the model answers, if it has one.

        Args:
            model: The model.
            factor: See `loss_terms.recorded`. Losses in a `compute_loss` of the
                model's own are left as they are.
        """
        own_weight = own_micro_batch_weight(model)
        if weighs_itself(model):
            factor = None

        def watched(compute_loss, *args, **kwargs):
            with loss_terms.recorded(factor) as terms:
                loss = compute_loss(*args, **kwargs)
            if own_weight is not None:
                given = inspect.signature(compute_loss).bind(*args, **kwargs)
                names = ("x", "y", "y_pred", "sample_weight")
                values = (given.arguments.get(name) for name in names)
                self.weight = checks.micro_batch_weight(own_weight(*values))
            elif not weighs_itself(model):
                self._take(terms, loss, model)
            return loss

        return shadow.method(model, "compute_loss", watched)

    def numerator(
        self, loss: tf.Tensor, cycle_length: tf.Tensor | int
    ) -> tf.Tensor:
        """The part of `loss` to be summed over the cycle, for a sum.

        What layers have added with `add_loss` is a mean over rows, and is
        shared out among the micro-batches.
        """
        if not self._added or loss is not self._loss:
            return loss
        added = tf.add_n([tf.reduce_sum(each) for each in self._added])
        return (
            tf.reduce_sum(loss)
            - added
            + added / tf.cast(cycle_length, added.dtype)
        )

    def share(self, loss: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        """`loss` times `share`, for a part of a batch."""
        shared = loss * tf.cast(share, loss.dtype)
        if loss is self._loss:
            self._loss = shared
            self._added = [
                tf.reduce_sum(each) * tf.cast(share, each.dtype)
                for each in self._added
            ]
        return shared

    def take_part(self, part: "MicroBatch") -> None:
        """Takes over of which kind the loss of a part of this batch is."""
        self.is_sum = part.is_sum
        self.has_mixed_denominators = part.has_mixed_denominators

    def _take(self, terms, loss, model):
        self.terms = terms
        if not loss_terms.have_one_denominator(terms):
            self.has_mixed_denominators = True
            return
        if loss_terms.is_sum(terms):
            self.is_sum = True
            self.weight = tf.ones((), "float32")
            self._loss = loss
            self._added = added_losses(model)
            num_replicas = model.distribute_strategy.num_replicas_in_sync
            if num_replicas > 1:
                # As they are in `loss`: Keras divides them, but no sum.
                self._added = [each / num_replicas for each in self._added]
        elif terms:
            denominator = terms[0].denominator()
            if denominator is not None:
                self.weight = tf.stop_gradient(denominator)


def added_losses(model: keras.Model) -> list[tf.Tensor]:
    """What layers have added to the loss in the last call of `model`."""
    # Keras lists what was added first, and the penalties last.
    losses = model.losses
    return losses[: len(losses) - len(weight_penalties(model))]


def weight_penalties(model: keras.Model) -> list[tf.Tensor]:
    """The regularisers on the trainable weights of `model`, scalars."""
    return [
        tf.reduce_sum(weight.regularizer(weight))
        for weight in model.trainable_weights
        if getattr(weight, "regularizer", None) is not None
    ]


def weight_penalty(model: keras.Model) -> tf.Tensor | None:
    """Their sum, or None if there are none."""
    penalties = weight_penalties(model)
    return tf.add_n(penalties) if penalties else None


def own_micro_batch_weight(model: keras.Model) -> Callable[..., Any] | None:
    """The `micro_batch_weight` that the model's author wrote, if any."""
    method = getattr(model, "micro_batch_weight", None)
    if method is None or getattr(method, "is_default", False):
        return None
    return method


def weighs_itself(model: keras.Model) -> bool:
    """True when the author of `model` wrote what its loss is divided by."""
    if own_micro_batch_weight(model) is not None:
        return True
    return type(model).compute_loss is not keras.Model.compute_loss
