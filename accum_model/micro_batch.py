"""What a training step knows of its micro-batch, for the optimizer to use.

The step's own code does not pass it on: `AccumOptimizer.apply` finds it where
the step was started.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import checks
from accum_model import loss_terms


class MicroBatch:
    """The weight of one micro-batch.

    Args:
        num_rows: int64 scalar, rows of the micro-batch.

    Attributes:
        num_rows: As given.
        weight: Scalar: the denominator of the compiled loss, as far as it is
            known; else the rows.
        is_sum: True when the loss is a sum, which is not to be divided.
        has_mixed_denominators: True when several outputs are divided by
            different things, which no single weight can do justice to.
    """

    def __init__(self, num_rows: tf.Tensor) -> None:
        self.num_rows = num_rows
        self.weight: tf.Tensor = num_rows
        self.is_sum = False
        self.has_mixed_denominators = False
        self._loss: tf.Tensor | None = None
        self._added: list[tf.Tensor] = []

    def watch(self, model: keras.Model) -> Any:
        """A block in which `model.compute_loss` tells the weight.

        A `compute_loss` of the model's own counts rows. So does one that
        `micro_batch_weight` of the model answers for, if it has one.
        """
        compute_loss = model.compute_loss
        own_weight = own_micro_batch_weight(model)

        @functools.wraps(compute_loss)
        def watched(*args, **kwargs):
            with loss_terms.recorded() as terms:
                loss = compute_loss(*args, **kwargs)
            if own_weight is not None:
                given = inspect.signature(compute_loss).bind(*args, **kwargs)
                names = ("x", "y", "y_pred", "sample_weight")
                values = (given.arguments.get(name) for name in names)
                self.weight = checks.micro_batch_weight(own_weight(*values))
            elif not _has_own_compute_loss(model):
                self._take(terms, loss, model)
            return loss

        return _keras_compat.instance_attribute(model, "compute_loss", watched)

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

    def _take(self, terms, loss, model):
        if not loss_terms.have_one_denominator(terms):
            self.has_mixed_denominators = True
            return
        if loss_terms.is_sum(terms):
            self.is_sum = True
            self.weight = tf.ones((), "float32")
            self._loss = loss
            # Keras lists what was added first, and the penalties last.
            num_penalties = len(weight_penalties(model))
            self._added = model.losses[: len(model.losses) - num_penalties]
        elif terms:
            denominator = terms[0].denominator()
            if denominator is not None:
                self.weight = tf.stop_gradient(denominator)


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


def _has_own_compute_loss(model: keras.Model) -> bool:
    return type(model).compute_loss is not keras.Model.compute_loss
