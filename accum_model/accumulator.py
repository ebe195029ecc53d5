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

from accum_model.replicas import Replicas

# Of a cycle's saved state: what is made only where somebody looks.
OPTIONAL = ("missing_weight", "num_spoiled")

Gradient = tf.Tensor | tf.IndexedSlices | None


class Accumulator:
    """Holds what one list of variables has collected in its cycle.

    Args:
        variables: Trainable variables, in the order of their gradients.
        sums: One buffer per variable, of its shape, all zeros.
        add_variable: Makes a variable of the owning optimizer, see
            `keras.optimizers.Optimizer.add_variable`.
        accum_steps: int >= 1, micro-batches in the first cycle.
        replicas: Those that share the variables. Each has sums of its own.

    Attributes:
        position: int64 scalar variable, micro-batches in the cycle so far.
        cycle_length: int64 scalar variable, micro-batches in this cycle.
        weight_sum: Scalar variable, sum of the replica's weights so far;
            float32, or float64 if a buffer is.
        is_sum: True when the update is the sum, not the mean; None until
            somebody has said so.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        sums: Sequence[keras.Variable],
        add_variable: Callable[..., keras.Variable],
        accum_steps: int,
        replicas: Replicas,
    ) -> None:
        self.variables = list(variables)
        self.sums = list(sums)
        self.replicas = replicas
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
        self.weight_sum = self._add_local((), "weight_sum")
        # Known once a training step was traced, or a file was read.
        self.is_sum: bool | None = None
        self._num_spoiled: keras.Variable | None = None

    def is_over(self) -> tf.Tensor:
        """True when the last micro-batch of the cycle was counted."""
        return self.position.value >= self.cycle_length.value

    def accumulate(
        self,
        gradients: Sequence[Gradient],
        weight: tf.Tensor,
        factor: tf.Tensor,
    ) -> None:
        """Adds one micro-batch, on the replica that has seen it.

        Args:
            gradients: Gradients of the micro-batch, one per variable.
            weight: Its weight, scalar: its share of the denominator.
            factor: What its gradients are multiplied by, scalar: the weight,
                with the loss scale taken out.
        """
        dtypes = {total.dtype for total in self.sums}
        factors = {dtype: tf.cast(factor, dtype) for dtype in dtypes}
        opposites = {dtype: -factors[dtype] for dtype in dtypes}
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
                self._scatter(total, gradient, factors[total.dtype])
            elif self.replicas.are_several or total.dtype == "bfloat16":
                product = self._weighted(gradient, factors[total.dtype], total)
                total.value.assign_add(product, read_value=False)
            else:
                # total -= -factor * gradient, in one pass: no product takes
                # memory. On GPUs it does not exist for bfloat16.
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=total.value.handle,
                    alpha=opposites[total.dtype],
                    delta=tf.cast(gradient, total.dtype),
                )
        self._note_missing(gradients, weight)
        self.weight_sum.value.assign_add(weight)

    def count(self) -> None:
        """Counts a micro-batch."""
        self.position.value.assign_add(1)

    def start_over(self) -> None:
        """Starts a cycle of the same length if this one is over.

        For a cycle whose weights are all zero: it has nothing to apply, and
        its sums are zero.
        """
        self.position.value.assign(
            self.position.value % self.cycle_length.value
        )

    def read(self, indices: Sequence[int]) -> list[tf.Tensor]:
        """The sums of the replica.

        Args:
            indices: Which variables to return the sum of.

        Returns:
            For each index a tensor of the variable's shape and buffer's dtype.
        """
        return [
            tf.convert_to_tensor(self.sums[index].value) for index in indices
        ]

    def means(
        self,
        indices: Sequence[int],
        numerators: Sequence[tf.Tensor],
        total_weight: tf.Tensor,
    ) -> list[tf.Tensor]:
        """What the update receives.

        Args:
            indices: Which variables it is of.
            numerators: Of all replicas, one per index.
            total_weight: Sum of the weights of all replicas, scalar.
        """
        dtypes = {numerator.dtype for numerator in numerators}
        divisors = {dtype: tf.cast(total_weight, dtype) for dtype in dtypes}
        means = []
        for index, numerator in zip(indices, numerators, strict=True):
            if is_overwritten(self.variables[index]):
                # Keras takes the mean of what the replicas overwrite with.
                numerator = numerator / self.replicas.count
            elif not self.is_sum:
                numerator = numerator / divisors[numerator.dtype]
            means.append(numerator)
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

    def empty(self) -> None:
        """Empties the replica's sums."""
        others = (self._missing_weight, self._num_spoiled)
        totals = [*self.sums, *(each for each in others if each is not None)]
        shapes = {
            shape: tf.constant(list(shape), "int32", (len(shape),))
            for shape in {total.shape for total in totals}
        }
        for total in totals:
            # Zeros of its own: TensorFlow would have equal ones share memory,
            # and copy them when the next micro-batch is added.
            zeros = tf.raw_ops.Empty(
                shape=shapes[total.shape], dtype=total.dtype, init=True
            )
            total.value.assign(zeros, read_value=False)
        self.weight_sum.value.assign(tf.zeros((), self.weight_dtype))

    def start(self, accum_steps: tf.Tensor | int) -> None:
        """Starts a cycle of `accum_steps` with sums that are empty."""
        self.position.assign(tf.zeros((), "int64"))
        self.cycle_length.assign(accum_steps)

    def reset(self, accum_steps: keras.Variable) -> None:
        """Empties the sums of all replicas and starts a cycle."""

        def reset():
            self.replicas.on_each(self.empty)
            self.start(accum_steps.value)

        self.replicas.together(reset)

    @property
    def missing_weight(self) -> keras.Variable:
        """Per variable the weight of the micro-batches that lacked it.

        Made when the first gradient is missing: most models never need it.
        """
        if self._missing_weight is None:

            def add():
                shape = (len(self.variables),)
                with tf.init_scope():
                    self._missing_weight = self._add_local(
                        shape, "missing_weight"
                    )

            self.replicas.together(add)
        return self._missing_weight

    @property
    def num_spoiled(self) -> keras.Variable:
        """Scalar of `weight_dtype`: micro-batches that were not finite.

        Of this replica and cycle. Made where somebody looks.
        """
        if self._num_spoiled is None:

            def add():
                with tf.init_scope():
                    self._num_spoiled = self._add_local((), "num_spoiled")

            self.replicas.together(add)
        return self._num_spoiled

    def shared_state(self) -> dict[str, keras.Variable]:
        """The variables that are the same on all replicas, by saved name."""
        return {
            "cycle_position": self.position,
            "cycle_length": self.cycle_length,
        }

    def local_state(self) -> dict[str, keras.Variable]:
        """The variables that each replica has for itself, by saved name."""
        state = {"weight_sum": self.weight_sum}
        if self._num_spoiled is not None:
            state["num_spoiled"] = self._num_spoiled
        if self._missing_weight is not None:
            state["missing_weight"] = self._missing_weight
        for index, total in enumerate(self.sums):
            state[f"gradient_sum_{index}"] = total
        return state

    def _add_local(self, shape, name):
        with self.replicas.local_variables():
            return self._add_variable(shape, dtype=self.weight_dtype, name=name)

    def _weighted(self, gradient, factor, total):
        """A dense gradient of the replica, times `factor`."""
        gradient = tf.cast(gradient, total.dtype)
        if self.replicas.are_several:
            # A replica without rows has no weight, and may have NaN.
            return tf.math.multiply_no_nan(gradient, factor)
        return gradient * factor

    def _scatter(self, total, gradient, factor):
        # `scatter_add` does not exist for variables of several replicas.
        tf.raw_ops.ResourceScatterAdd(
            resource=total.value.handle,
            indices=gradient.indices,
            updates=self._weighted(gradient.values, factor, total),
        )

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


def is_overwritten(variable: keras.Variable) -> bool:
    """True for variables whose "gradient" is their next value.

    Scales of float8 training, for which Keras keeps the largest of a cycle.
    """
    return getattr(variable, "overwrite_with_gradient", False)
