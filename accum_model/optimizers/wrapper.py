"""What optimizers that hold another one have in common.

The weights are moved by the inner optimizer; its rate, counter, loss scale and
state are those of the wrapper too.
"""

from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import optimizer_chain
from accum_model import optimizer_checks
from accum_model.accumulator import Gradient
from accum_model.optimizer_state import OptimizerState
from accum_model.optimizers import inner_options


class Wrapper(keras.optimizers.Optimizer):
    """Passes everything on to an inner optimizer.

    Args:
        inner_optimizer: A Keras optimizer, or the name or config of one.
        name: Name of the wrapper, or None for a generated one.
        **kwargs: Arguments of `keras.optimizers.Optimizer` that are to be set
            on the inner optimizer.

    Attributes:
        inner_optimizer: The optimizer that makes the updates.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer.
        ValueError: If another argument is not in its range, or contradicts the
            inner optimizer's.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        inner_optimizer = optimizer_checks.optimizer(
            "inner_optimizer", inner_optimizer
        )
        inner_options.give(inner_optimizer, kwargs)
        # A callable makes no variable; the rate is the inner optimizer's.
        super().__init__(
            learning_rate=lambda: self.inner_optimizer.learning_rate, name=name
        )
        self.inner_optimizer = inner_optimizer

    # What is passed on to the inner optimizer.

    @property
    def iterations(self) -> keras.Variable:
        """Updates made, the counter of the innermost optimizer."""
        return optimizer_chain.innermost(self).iterations

    @property
    def own_iterations(self) -> keras.Variable:
        """A counter of the wrapper's own, which starts at 0."""
        return super().iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def loss_scale_factor(self) -> float | None:
        """The inner optimizer's fixed loss scale."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        if "inner_optimizer" in vars(self):  # Keras sets it before.
            self.inner_optimizer.loss_scale_factor = factor

    @property
    def variables(self) -> list[keras.Variable]:
        """Own variables, then the inner optimizer's."""
        return super().variables + self.inner_optimizer.variables

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the inner optimizer's variables."""
        with tf.init_scope():
            if not self.inner_optimizer.built:
                self.inner_optimizer.build(variables)
            if not self.built:
                super().build(variables)

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Has the inner optimizer apply them."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            self.build(trainable_variables)
        self.inner_optimizer.apply(grads, trainable_variables)

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Sets final values as the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def holds_cycles(self) -> bool:
        """True with an accumulating optimizer inside."""
        found = optimizer_chain.find(self.inner_optimizer, OptimizerState)
        return found is not None

    # Files.

    def __dir__(self) -> list[str]:
        # Keras saves every optimizer it finds among the attributes. The inner
        # one is saved among the own variables, unless it has more to save.
        names = super().__dir__()
        if "inner_optimizer" not in vars(self) or self.holds_cycles():
            return names
        return [name for name in names if name != "inner_optimizer"]

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes own variables, and the inner optimizer's."""
        for number, variable in enumerate(self._saved_variables()):
            store[str(number)] = variable.numpy()

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Takes over what `save_own_variables` wrote."""
        if not self.fits(store):
            super().load_own_variables(store)  # It says that it skips.
            return
        for number, variable in enumerate(self._saved_variables()):
            variable.assign(store[str(number)])

    def fits(self, store: Mapping[str, Any]) -> bool:
        """True when `store` holds as many variables as there are."""
        return len(store.keys()) == len(self._saved_variables())

    def _saved_variables(self):
        return super().variables if self.holds_cycles() else self.variables

    def get_config(self) -> dict[str, Any]:
        """Returns the name, and the inner optimizer as its config."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
        }

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> "Wrapper":
        """Makes an optimizer from what `get_config` returned."""
        config = dict(config)
        config["inner_optimizer"] = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**config)
