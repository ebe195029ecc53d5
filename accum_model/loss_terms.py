"""What the compiled loss divides by, seen while Keras computes it.

Keras reduces per-element losses :math:`l_e` with sample weights :math:`s_e` and
a mask :math:`m_e` to a quotient. Its denominator is

==============================  =============================================
reduction                       denominator
==============================  =============================================
`sum_over_batch_size`, `mean`   number of elements, or of valid ones if masked
`mean_with_sample_weight`       sum of the sample weights of valid elements
`sum`, `none`, None             none: a sum is not divided
==============================  =============================================

`keras.losses.Loss.__call__` is watched for the time of one call of
`compute_loss`, because what it reduces is known nowhere else.
"""

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import shadow

_SUMS = ("sum", "none", None)


@dataclasses.dataclass(frozen=True)
class Term:
    """The loss of one output: how it was reduced, and what.

    Attributes:
        reduction: The reduction of the loss.
        values: Losses per element, as `call` returned them; None when the loss
            has a `__call__` of its own.
        mask: Valid elements, or None for all.
        sample_weight: As handed to the loss, or None.
    """

    reduction: str | None
    values: tf.Tensor | None
    mask: tf.Tensor | None
    sample_weight: Any

    @property
    def is_sum(self) -> bool:
        """True when the loss is not divided by anything."""
        # A loss with one number per batch is not reduced at all.
        has_elements = self.values is not None and self.values.shape.rank != 0
        return has_elements and self.reduction in _SUMS

    @property
    def is_divided_by_others(self) -> bool:
        """True when it is divided by something else than its elements."""
        return self.kind not in (("rows",), ("sum",))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for terms whose denominators grow in step with each other."""
        if self.values is None or self.values.shape.rank == 0:
            return ("rows",)
        if self.is_sum:
            return ("sum",)
        mask = None if self.mask is None else id(self.mask)
        if self.reduction != "mean_with_sample_weight":
            return ("rows",) if mask is None else ("valid", mask)
        if self.sample_weight is None:
            return ("rows",) if mask is None else ("valid", mask)
        return ("weight", mask, id(self.sample_weight))

    def denominator(self) -> tf.Tensor | None:
        """Scalar, or None where only the rows can tell."""
        if self.values is None or self.values.shape.rank == 0:
            return None
        values = self.values
        num_elements = tf.cast(tf.size(values), values.dtype)
        is_weighted = (
            self.reduction == "mean_with_sample_weight"
            and self.sample_weight is not None
        )
        if self.mask is None and not is_weighted:
            return num_elements
        mask = self.mask
        if mask is not None:
            mask = tf.cast(mask, values.dtype)
        if not is_weighted:
            num_valid = tf.reduce_sum(mask)
            if self.reduction == "mean_with_sample_weight" or (
                _have_same_sizes(mask, values)
            ):
                return num_valid
            return (
                num_valid * num_elements / tf.cast(tf.size(mask), values.dtype)
            )
        weight = tf.cast(self.sample_weight, values.dtype)
        if mask is not None:
            weight, mask = _same_rank(weight, mask)
            weight = weight * mask
        return tf.reduce_sum(weight)


# (index of the term, term) -> what its value is to be multiplied by, or None.
Factor = Callable[[int, Term], tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class _Recorder:
    terms: list[Term] = dataclasses.field(default_factory=list)
    factor: Factor = lambda index, term: None


@contextlib.contextmanager
def recorded(factor: Factor | None = None) -> Iterator[list[Term]]:
    """Collects the terms of the losses called inside the block.

    Args:
        factor: Says what the value of each loss is multiplied by before the
            caller sees it. None leaves them all.
    """
    recorder = _Recorder() if factor is None else _Recorder([], factor)
    with _watched_losses():
        token = _recorder.set(recorder)
        try:
            yield recorder.terms
        finally:
            _recorder.reset(token)


# What notes the losses called in this thread, or None.
_recorder: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar(
    "recorder", default=None
)
_lock = threading.Lock()
_num_watching = 0
_original_call = keras.losses.Loss.__call__


@contextlib.contextmanager
def _watched_losses():
    """Has every loss noted while anyone, in any thread, is recording."""
    global _num_watching
    with _lock:
        _num_watching += 1
        keras.losses.Loss.__call__ = _noting_call
    try:
        yield
    finally:
        with _lock:
            _num_watching -= 1
            if not _num_watching:
                keras.losses.Loss.__call__ = _original_call


@functools.wraps(_original_call)
def _noting_call(self, y_true, y_pred, sample_weight=None):
    recorder = _recorder.get()
    if recorder is None:
        return _original_call(self, y_true, y_pred, sample_weight)
    values = []

    def recording(call, *args, **kwargs):
        values.append(call(*args, **kwargs))
        return values[-1]

    index = len(recorder.terms)
    inner = _Recorder([], lambda i, term: recorder.factor(index + i, term))
    token = _recorder.set(inner)
    try:
        with shadow.method(self, "call", recording):
            result = _original_call(self, y_true, y_pred, sample_weight)
    finally:
        _recorder.reset(token)
    value = values[-1] if values else None
    masks = [
        mask
        for mask in map(_keras_compat.keras_mask, (y_pred, value))
        if mask is not None
    ]
    mask = masks[0] if len(masks) == 1 else None
    if len(masks) == 2:
        mask = tf.logical_and(*(tf.cast(m, "bool") for m in masks))
    if value is not None:
        value = tf.convert_to_tensor(value)
    is_scalar = value is None or value.shape.rank == 0
    if is_scalar and inner.terms and sample_weight is None:
        # It leaves reducing to the losses that it calls.
        recorder.terms.extend(inner.terms)
        return result
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if num_replicas > 1 and value is not None and is_scalar:
        # Keras does not reduce it, and forgets to divide it by the replicas.
        result /= num_replicas
    term = Term(self.reduction, value, mask, sample_weight)
    recorder.terms.append(term)
    factor = recorder.factor(index, term)
    return result if factor is None else result * tf.cast(factor, result.dtype)


def is_sum(terms: Sequence[Term]) -> bool:
    """True when no term is divided: the whole loss is a sum over rows."""
    return bool(terms) and all(term.is_sum for term in terms)


def have_one_denominator(terms: Sequence[Term]) -> bool:
    """True when all terms are divided by the same, up to a constant."""
    return len({term.kind for term in terms}) <= 1


def _have_same_sizes(one: tf.Tensor, other: tf.Tensor) -> bool:
    """True when that is seen without computing either, which is cheaper."""
    if one.shape.rank is None or other.shape.rank is None:
        return False
    return one.shape[1:].as_list() == other.shape[1:].as_list()


def _same_rank(one: tf.Tensor, other: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Keras's rule for a trailing axis of one."""
    if one.shape.rank == other.shape.rank + 1 and one.shape[-1] == 1:
        if other.shape.rank == 1:
            return one, tf.expand_dims(other, -1)
        return tf.squeeze(one, -1), other
    if other.shape.rank == one.shape.rank + 1 and other.shape[-1] == 1:
        if one.shape.rank == 1:
            return tf.expand_dims(one, -1), other
        return one, tf.squeeze(other, -1)
    return one, other
