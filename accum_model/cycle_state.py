"""Where a file keeps what a cycle has collected, beside the optimizer's state.

Apart from it, so that a plain model can read the optimizer's state of the same
file, and ours that of a plain model's file.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import MutableMapping
from typing import Any

import keras


class CycleState(keras.losses.Loss):
    """A thing that Keras saves: a `Loss`, its lightest kind, without variables.

    Args:
        save: Writes the state into a mapping of arrays.
        load: Takes the state over from such a mapping.
    """

    def __init__(
        self,
        save: Callable[[MutableMapping[str, Any]], None],
        load: Callable[[Mapping[str, Any]], None],
    ) -> None:
        super().__init__(name="cycle_state")
        self._save = save
        self._load = load

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Called by Keras when it writes a file."""
        self._save(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Called by Keras when it reads a file."""
        self._load(store)
