"""Forward passes that change no variable.

What layers, losses and metrics assign to Keras variables (moving statistics,
seeds, counts) is kept aside, handed from micro-batch to micro-batch, and
assigned once the whole batch has gone through. A step that fails on the way
has changed nothing, and a pass can be repeated from where it began.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf


class PureScope(keras.StatelessScope):
    """Keeps assignments to Keras variables to itself.

    Args:
        model: The model that is run inside.
        variables: Variables with another value inside than outside.
        values: Their values, one tensor per variable.
        displacement: What is added to the trainable variables inside, one
            tensor each, or None for nothing.

    Attributes:
        assigned: The variables that were assigned inside, in order.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Sequence[keras.Variable] = (),
        values: Sequence[tf.Tensor] = (),
        displacement: Sequence[tf.Tensor] | None = None,
    ) -> None:
        super().__init__(collect_losses=True)
        self.assigned: list[keras.Variable] = []
        # Keras asks for the value of each variable that has a penalty. These
        # are TensorFlow's variables, not copies.
        for j, variable in enumerate(model.trainable_variables):
            value = variable.value
            if displacement is not None:
                value = value + tf.cast(displacement[j], value.dtype)
            super().add_update((variable, value))
        for variable, value in zip(variables, values, strict=True):
            self._set(variable, value)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Notes an assignment."""
        variable, value = update
        if all(variable is not each for each in self.assigned):
            self.assigned.append(variable)
        self._set(variable, value)

    def values_of(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The values of `variables` at this point, without a gradient."""
        return [
            tf.stop_gradient(tf.convert_to_tensor(self.get_current_value(v)))
            for v in variables
        ]

    def _set(self, variable, value):
        """Sets a value, with the gradient that the variable would have.

        A layer that assigns its trainable weight, as spectral normalisation
        does, is trained by the gradient at the value that it has assigned.
        """
        held = self.get_current_value(variable)
        if held is not None and variable.trainable:
            held = tf.convert_to_tensor(held)
            value = tf.stop_gradient(value) + (held - tf.stop_gradient(held))
        super().add_update((variable, value))
