"""The buffers: gradient sums, weight sum and position of one cycle.

With gradient :math:`g_i` of the mean loss of micro-batch :math:`i` and its
weight :math:`w_i` (rows, unless told otherwise) an update receives

.. math:: \\bar g = \\sum_i w_i g_i \\, / \\, \\sum_i w_i .

Sums are kept and the division happens once, so a partial cycle is divided by
what was collected.
"""

from collections.abc import Callable
from collections.abc import Sequence

import keras
import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices | None


class Accumulator:
    """Holds what one list of variables has collected in its cycle.

    Args:
        variables: Trainable variables, in the order of their gradients.
        sums: One buffer per variable, of its shape, all zeros.
        add_variable: Makes a variable of the owning optimizer, see
            `keras.optimizers.Optimizer.add_variable`.
        accum_steps: int >= 1, micro-batches in the first cycle.

    Attributes:
        position: int64 scalar variable, micro-batches in the cycle so far.
        cycle_length: int64 scalar variable, micro-batches in this cycle.
        weight_sum: Scalar variable, sum of the weights so far; float32, or
            float64 if a buffer is.
        is_sum: True when the update is the sum, not the mean; None until
            somebody has said so.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        sums: Sequence[keras.Variable],
        add_variable: Callable[..., keras.Variable],
        accum_steps: int,
    ) -> None:
        self.variables = list(variables)
        self.sums = list(sums)
        self._add_variable = add_variable
        self._missing_weight: keras.Variable | None = None
        has_float64 = any(s.dtype == "float64" for s in self.sums)
        self.weight_dtype = "float64" if has_float64 else "float32"
        self.position = add_variable((), dtype="int64", name="cycle_position")
        self.cycle_length = add_variable(
            (),
            initializer=keras.initializers.Constant(accum_steps),
            dtype="int64",
            name="cycle_length",
        )
        self.weight_sum = add_variable(
            (), dtype=self.weight_dtype, name="weight_sum"
        )
        # Known once a training step was traced, or a file was read.
        self.is_sum: bool | None = None
        self._is_spoiled: keras.Variable | None = None

    def ends_cycle(self) -> tf.Tensor:
        """True when the next micro-batch is the last one of the cycle."""
        return self.position.value + 1 >= self.cycle_length.value

    def accumulate(
        self,
        gradients: Sequence[Gradient],
        weight: tf.Tensor,
        factor: tf.Tensor,
    ) -> None:
        """Adds one micro-batch.

        A cycle whose weights are all zero has nothing to apply and starts over
        here, with sums that are zero.

        Args:
            gradients: Gradients of the micro-batch, one per variable.
            weight: Its weight, scalar: its share of the denominator.
            factor: What its gradients are multiplied by, scalar: the weight,
                with the loss scale taken out.
        """
        for variable, total, gradient in zip(
            self.variables, self.sums, gradients, strict=True
        ):
            if gradient is None:
                continue
            if is_overwritten(variable):
                total.value.assign(
                    tf.maximum(total.value, tf.cast(gradient, total.dtype))
                )
            elif isinstance(gradient, tf.IndexedSlices):
                total.value.scatter_add(_weighted(gradient, factor, total))
            else:
                total.value.assign_add(_weighted(gradient, factor, total))
        self._note_missing(gradients, weight)
        self.weight_sum.value.assign_add(weight)
        self.position.value.assign(
            (self.position.value + 1) % self.cycle_length.value
        )

    def average(
        self,
        indices: Sequence[int],
        gradients: Sequence[Gradient],
        weight: tf.Tensor,
        factor: tf.Tensor,
    ) -> list[tf.Tensor]:
        """The mean gradients of the cycle together with a last micro-batch.

        Args:
            indices: Which variables to return the gradient of.
            gradients: Gradients of the last micro-batch, one per variable.
            weight: Weight of the last micro-batch, scalar.
            factor: What its gradients are multiplied by, scalar.

        Returns:
            For each index a tensor of the variable's shape and buffer's dtype.
        """
        total_weight = self.weight_sum.value + weight
        divisor = tf.ones_like(total_weight) if self.is_sum else total_weight
        means = []
        for index in indices:
            total, gradient = self.sums[index], gradients[index]
            if is_overwritten(self.variables[index]):
                mean = total.value
                if gradient is not None:
                    mean = tf.maximum(mean, tf.cast(gradient, total.dtype))
                means.append(mean)
                continue
            if gradient is None:
                numerator = total.value
            elif isinstance(gradient, tf.IndexedSlices):
                # The buffer is zeroed right after: it may hold the last
                # micro-batch too, and no dense copy of it is made.
                total.value.scatter_add(_weighted(gradient, factor, total))
                numerator = tf.convert_to_tensor(total.value)
            else:
                numerator = total.value + _weighted(gradient, factor, total)
            means.append(numerator / tf.cast(divisor, total.dtype))
        return means

    def has_gradient(self, indices: Sequence[int]) -> tf.Tensor:
        """For each index True when the cycle holds a gradient of the variable.

        Returns:
            bool tensor of shape `(len(indices),)`.
        """
        if self._missing_weight is None:
            return tf.fill((len(indices),), self.weight_sum.value > 0)
        # Both sums have added the same numbers in the same order if the
        # gradient was missing every time, so equality is exact.
        missing = tf.gather(self._missing_weight.value, list(indices))
        return missing < self.weight_sum.value

    def reset(self, accum_steps: tf.Tensor | int) -> None:
        """Empties the buffers and starts a cycle of `accum_steps`."""
        for total in self.sums:
            total.value.assign(tf.zeros(total.shape, total.dtype))
        if self._missing_weight is not None:
            self._missing_weight.assign(
                tf.zeros(self._missing_weight.shape, self.weight_dtype)
            )
        if self._is_spoiled is not None:
            self._is_spoiled.assign(tf.constant(False))
        self.weight_sum.assign(tf.zeros((), self.weight_dtype))
        self.position.assign(tf.zeros((), "int64"))
        self.cycle_length.assign(accum_steps)

    @property
    def missing_weight(self) -> keras.Variable:
        """Per variable the weight of the micro-batches that lacked it.

        Made when the first gradient is missing: most models never need it.
        """
        if self._missing_weight is None:
            with tf.init_scope():
                self._missing_weight = self._add_variable(
                    (len(self.variables),),
                    dtype=self.weight_dtype,
                    name="missing_weight",
                )
        return self._missing_weight

    @property
    def is_spoiled(self) -> keras.Variable:
        """bool scalar: a gradient of the cycle was not finite.

        Made where somebody looks.
        """
        if self._is_spoiled is None:
            with tf.init_scope():
                self._is_spoiled = self._add_variable(
                    (), dtype="bool", name="is_spoiled"
                )
        return self._is_spoiled

    def state(self) -> dict[str, keras.Variable]:
        """All variables by the name under which they are saved."""
        state = {
            "cycle_position": self.position,
            "cycle_length": self.cycle_length,
            "weight_sum": self.weight_sum,
        }
        if self._is_spoiled is not None:
            state["is_spoiled"] = self._is_spoiled
        if self._missing_weight is not None:
            state["missing_weight"] = self._missing_weight
        for index, total in enumerate(self.sums):
            state[f"gradient_sum_{index}"] = total
        return state

    def _note_missing(
        self, gradients: Sequence[Gradient], weight: tf.Tensor
    ) -> None:
        is_missing = [gradient is None for gradient in gradients]
        if any(is_missing):
            mask = tf.constant(is_missing, self.weight_dtype)
            self.missing_weight.value.assign_add(mask * weight)


def sum_dtype(variable: keras.Variable, accum_dtype: str | None) -> str:
    """The dtype of a buffer: float64 for float64 variables, else float32."""
    if accum_dtype is not None:
        return accum_dtype
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return "float64" if dtype == "float64" else "float32"


def _weighted(
    gradient: tf.Tensor | tf.IndexedSlices,
    factor: tf.Tensor,
    total: keras.Variable,
) -> tf.Tensor | tf.IndexedSlices:
    factor = tf.cast(factor, total.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, total.dtype) * factor
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, total.dtype) * factor


def is_overwritten(variable: keras.Variable) -> bool:
    """True for variables whose "gradient" is their next value.

    Scales of float8 training, for which Keras keeps the largest of a cycle.
    """
    return getattr(variable, "overwrite_with_gradient", False)
