"""Learning rates that depend on the number of the update.

Outside an update `learning_rate` is what was set, so that callbacks can read
it and set it. During an update it is what the update uses, so that weight decay
is in proportion to that, as in AdamW.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import optimizer_checks
from accum_model.accumulator import Gradient
from accum_model.optimizers import dense_gradients


class UpdateRate(keras.optimizers.Optimizer):
    """An optimizer with a rule for the rate of each update.

    Sparse gradients are made dense before clipping. Subclasses override
    `rate_of_update` and `has_own_rate`, and may override `shared_part`.
    """

    # Tensors of the update that is being made, None outside of it.
    _rate_in_use: tf.Tensor | None = None
    _shared: Any = None

    def rate_of_update(
        self, learning_rate: tf.Tensor, number: tf.Tensor
    ) -> tf.Tensor:
        """The rate of an update.

        Args:
            learning_rate: The rate that was set, float64 scalar.
            number: Number of the update from 1, float64 scalar.

        Returns:
            float64 scalar.
        """
        raise NotImplementedError

    def has_own_rate(self) -> bool:
        """True where `rate_of_update` returns anything but its argument."""
        return True

    def shared_part(self, number: tf.Tensor) -> Any:
        """What an update needs once, whatever the variables: `_shared`."""

    @property
    def learning_rate(self) -> Any:
        """The rate that was set; during an update, the rate in use."""
        if self._rate_in_use is not None:
            return self._rate_in_use
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        keras.optimizers.Optimizer.learning_rate.fset(self, learning_rate)

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """As in Keras, with the rate of this update."""
        grads = list(grads)
        variables = trainable_variables
        if variables is None:
            variables = self._trainable_variables
        variables = list(variables)
        if self.built or trainable_variables is not None:
            optimizer_checks.same_number(grads, variables)
            grads = dense_gradients.merged(grads, variables)
        number = tf.cast(tf.convert_to_tensor(self.iterations), "float64") + 1
        # Past Keras, which would look into them for things to track.
        try:
            vars(self)["_shared"] = self.shared_part(number)
            if self.has_own_rate():
                rate = tf.convert_to_tensor(super().learning_rate)
                vars(self)["_rate_in_use"] = self.rate_of_update(
                    tf.cast(rate, "float64"), number
                )
            super().apply(grads, trainable_variables)
        finally:
            vars(self).update(_shared=None, _rate_in_use=None)
