"""Where the accumulating optimizer stands among wrapped optimizers.

It belongs outside `keras.optimizers.LossScaleOptimizer`: inside, an overflow
would keep a micro-batch from being counted, and the loss scale would grow per
micro-batch.
"""

from typing import Any

import keras

from accum_model import optimizer_chain
from accum_model.optimizer import AccumOptimizer


def find(optimizer: keras.optimizers.Optimizer | None) -> AccumOptimizer | None:
    """The accumulating optimizer at any depth, or None."""
    return optimizer_chain.find(optimizer, AccumOptimizer)


def find_in(model: keras.Model) -> AccumOptimizer | None:
    """The accumulating optimizer of `model`; None also before `compile`."""
    return find(getattr(model, "optimizer", None))


class Nesting:
    """Puts an accumulating optimizer outermost, and can undo it.

    Args:
        optimizer: Any Keras optimizer: plain, accumulating, or a wrapper of
            either.
        accum_steps: int >= 1, for the accumulating optimizer that is made
            where there is none.
        options: Other arguments for it, by name.

    Attributes:
        outermost: The accumulating optimizer around all others.
        is_new: True when it was made here.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        accum_steps: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        found = find(optimizer)
        self.is_new = found is None
        if self.is_new:
            found = AccumOptimizer(optimizer, accum_steps, **(options or {}))
        self.outermost = found
        self._before: tuple[keras.optimizers.Optimizer, ...] = ()
        if found is not optimizer and not self.is_new:
            holder = optimizer
            while holder.inner_optimizer is not found:
                holder = holder.inner_optimizer
            self._before = (holder, found.inner_optimizer)
            holder.inner_optimizer = found.inner_optimizer
            found.inner_optimizer = optimizer

    def undo(self) -> None:
        """Nests the optimizers as they were."""
        if self._before:
            holder, inner = self._before
            self.outermost.inner_optimizer = inner
            holder.inner_optimizer = self.outermost
            self._before = ()
