"""Mean and variance over a cycle, for layers with moving statistics.

With :math:`n_i` elements, means :math:`m_i` and variances :math:`v_i` of the
micro-batches, those of all their elements together are

.. math:: m = \\sum_i n_i m_i / n, \\quad
          v = \\sum_i n_i \\, (v_i + (m_i - m)^2) / n, \\quad n = \\sum_i n_i

the second by the law of total variance. They are added up in pairs, which loses
no digits where means are large: Chan, Golub and LeVeque, `Algorithms for
Computing the Sample Variance <https://doi.org/10.1080/00031305.1983.10483115>`_,
1983, equation 2.1.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from accum_model import _keras_compat
from accum_model.replicas import Replicas

_current: contextvars.ContextVar["PooledMoments | None"] = (
    contextvars.ContextVar("pooled_moments", default=None)
)


def current() -> "PooledMoments | None":
    """Where a layer that is called now leaves its moments.

    None outside of a training step that accumulates.
    """
    return _current.get()


@dataclasses.dataclass
class _Sums:
    """Of one layer: elements, mean and sum of squares, shape (3, channels).

    Attributes:
        layer: The layer.
        staged: Of the step that runs now, or None until the layer is built.
        pooled: Of the cycle so far, or None until then.
    """

    layer: keras.layers.Layer
    staged: keras.Variable | None = None
    pooled: keras.Variable | None = None


class PooledMoments:
    """Pools moments of layers until an update, and moves their statistics then.

    What a step leaves is staged first, because only its gradients will tell if
    it counts.

    Args:
        add_variable: Makes a variable of the owning optimizer, see
            `keras.optimizers.Optimizer.add_variable`.
    """

    def __init__(self, add_variable: Callable[..., keras.Variable]) -> None:
        self._add_variable = add_variable
        self._sums: list[_Sums] = []
        # From a file, by the place of their layer, which is not built yet.
        self._loaded: dict[int, np.ndarray] = {}

    # Layers.

    def watch(self, model: keras.Model) -> None:
        """Finds the layers of `model`, in an order that is always the same."""
        for layer in _keras_compat.flat_layers(model):
            if getattr(layer, "pools_moments", False):
                self._find(layer)

    def build(self) -> None:
        """Makes the variables of all layers that are built."""
        for each in self._sums:
            if each.pooled is None and each.layer.built:
                self._add_sums(each)

    @contextlib.contextmanager
    def collecting(self, model: keras.Model) -> Iterator[None]:
        """A block in which layers of `model` leave their moments here."""
        self.watch(model)
        self.build()
        if not model.trainable_variables and model.built:
            yield  # There will be no update.
            return
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def stage(
        self,
        layer: keras.layers.Layer,
        count: tf.Tensor,
        mean: tf.Tensor,
        variance: tf.Tensor,
    ) -> None:
        """Takes the moments of one call of `layer`.

        Args:
            layer: The layer.
            count: Elements of each channel, scalar.
            mean: Their means, shape `(channels,)`.
            variance: Their variances, shape `(channels,)`.
        """
        each = self._find(layer)
        if each.pooled is None:
            self._add_sums(each)
        dtype = each.staged.dtype
        mean = tf.cast(mean, dtype)
        count = tf.fill(tf.shape(mean), tf.cast(count, dtype))
        sums = tf.stack([count, mean, tf.cast(variance, dtype) * count])
        # Those of no elements are not numbers.
        sums = tf.where(count > 0, sums, tf.zeros_like(sums))
        before = tf.convert_to_tensor(each.staged.value)
        each.staged.assign(combined(before, tf.stop_gradient(sums)))

    # Cycles.

    def absorb(self, is_kept: tf.Tensor | bool = True) -> None:
        """Takes what is staged into the cycle, or drops it.

        Args:
            is_kept: False for a micro-batch that is left out.
        """
        for each in self._with_variables():
            before = tf.convert_to_tensor(each.pooled.value)
            after = combined(before, tf.convert_to_tensor(each.staged.value))
            each.pooled.value.assign(tf.where(is_kept, after, before))
            each.staged.value.assign(tf.zeros_like(before))

    def settle(self) -> None:
        """Moves the statistics by the moments of the cycle, and empties it.

        Once for all replicas.
        """
        for each in self._with_variables():
            count, mean, squares = tf.unstack(self._total(each.pooled))
            variance = tf.math.divide_no_nan(squares, count)
            layer = each.layer
            _move(layer.moving_mean, mean, layer.momentum, count > 0)
            _move(layer.moving_variance, variance, layer.momentum, count > 0)
            each.pooled.assign(tf.zeros(each.pooled.shape, each.pooled.dtype))

    def _total(self, pooled):
        """The sums of all replicas, by way of their mean to lose no digits."""
        replicas = self._replicas
        if not replicas.are_several:
            return tf.convert_to_tensor(pooled.value)

        def weighted():
            count, mean, _ = tf.unstack(tf.convert_to_tensor(pooled.value))
            return tf.stack([count, count * mean])

        (sums,) = replicas.total([replicas.on_each(weighted)])
        count, weighted_mean = tf.unstack(replicas.first(sums))
        mean = tf.math.divide_no_nan(weighted_mean, count)

        def squares():
            own_count, own_mean, own = tf.unstack(
                tf.convert_to_tensor(pooled.value)
            )
            return own + own_count * tf.square(own_mean - mean)

        (total,) = replicas.total([replicas.on_each(squares)])
        return tf.stack([count, mean, replicas.first(total)])

    def keep_if(self, condition: tf.Tensor) -> None:
        """Empties the cycle unless `condition` holds."""
        for each in self._with_variables():
            value = tf.convert_to_tensor(each.pooled.value)
            value = tf.where(condition, value, tf.zeros_like(value))
            each.pooled.value.assign(value)

    def discard(self) -> None:
        """Forgets everything."""
        self._loaded = {}
        for each in self._with_variables():
            for variable in (each.staged, each.pooled):
                variable.assign(tf.zeros(variable.shape, variable.dtype))

    def unless(
        self,
        is_left_out: tf.Tensor,
        variables: Sequence[keras.Variable],
        before: Sequence[tf.Tensor],
        after: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Values of `variables` after a part of a batch.

        Args:
            is_left_out: True if its moments are to be left out.
            variables: Any variables; the others keep the value after it.
            before: Their values before it.
            after: Their values after it.
        """
        own = {id(each.staged) for each in self._with_variables()}
        return [
            tf.where(is_left_out, old, new) if id(variable) in own else new
            for variable, old, new in zip(variables, before, after, strict=True)
        ]

    # Files.

    def save(self, store: MutableMapping[str, Any]) -> None:
        """Writes the sums of a cycle that has begun into `store`."""
        values = dict(self._loaded)
        for place, each in enumerate(self._sums):
            if each.pooled is not None:
                parts = self._replicas.local_parts(each.pooled)
                values[place] = functools.reduce(combined, parts).numpy()
        for place, value in values.items():
            if value.any():
                store[f"moments_{place}"] = value

    def load(self, store: Mapping[str, Any]) -> None:
        """Takes over what `save` wrote."""
        self.discard()
        for name in store.keys():
            prefix, _, place = name.rpartition("_")
            if prefix == "moments":
                self._loaded[int(place)] = np.asarray(store[name])
        for place, each in enumerate(self._sums):
            if each.pooled is not None and place in self._loaded:
                self._put(each, self._loaded.pop(place))

    def _with_variables(self):
        return [each for each in self._sums if each.pooled is not None]

    def _find(self, layer):
        for each in self._sums:
            if each.layer is layer:
                return each
        self._sums.append(_Sums(layer))
        return self._sums[-1]

    def _add_sums(self, each):
        self._replicas.together(lambda: self._add_sums_once(each))

    def _add_sums_once(self, each):
        variable = each.layer.moving_mean
        is_double = keras.backend.standardize_dtype(variable.dtype) == "float64"
        shape = (3, *variable.shape)
        dtype = "float64" if is_double else "float32"
        with tf.init_scope(), self._replicas.local_variables():
            # Read inside a layer, which may want it in half precision. Empty
            # between steps, so it is not saved.
            each.staged = keras.Variable(
                np.zeros(shape),
                dtype=dtype,
                trainable=False,
                autocast=False,
                name=f"{each.layer.name}_staged_moments",
            )
            each.pooled = self._add_variable(
                shape, dtype=dtype, name=f"{each.layer.name}_pooled_moments"
            )
            loaded = self._loaded.pop(self._sums.index(each), None)
            if loaded is not None:
                self._put(each, loaded)

    def _put(self, each, value):
        """The first replica of this machine holds what its file did."""
        first, *others = self._replicas.local_parts(each.pooled)
        first.assign(value)
        for other in others:
            other.assign(tf.zeros_like(other))

    @property
    def _replicas(self):
        layers = [each.layer for each in self._sums if each.layer.built]
        return Replicas.of([layer.moving_mean for layer in layers])


def combined(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The sums of two sets of elements together, shape (3, channels)."""
    count = one[0] + other[0]
    share = tf.math.divide_no_nan(other[0], count)
    difference = other[1] - one[1]
    return tf.stack(
        [
            count,
            one[1] + difference * share,
            one[2] + other[2] + tf.square(difference) * one[0] * share,
        ]
    )


def _move(variable, value, momentum, has_value):
    before = tf.cast(tf.convert_to_tensor(variable.value), value.dtype)
    after = before * momentum + value * (1.0 - momentum)
    variable.assign(tf.where(has_value, after, before))
