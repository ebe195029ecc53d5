"""What has to be known of a training step before its loop is built.

It is found out by running into it: the first micro-batch that shows something
new notes it and begins again. Nothing has been changed by then.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from accum_model.cut import kept_outputs
from accum_model.cut.pure_state import PureScope

T = TypeVar("T")


class Restart(Exception):
    """The plan has changed while its loop was being built."""


@dataclasses.dataclass
class Plan:
    """What is known of a step.

    Attributes:
        is_built: True when model, losses and metrics have their variables.
        state: Variables that the step assigns before its update.
        keeps_outputs: True when the outputs of the whole batch are kept.
        num_terms: How many losses there are, once one of them is divided by
            something else than rows; else None.
        layout: Layout of the outputs, if they are kept.
        added_dtype: dtype of what layers add to the loss, if they do.
    """

    is_built: bool = False
    keeps_outputs: bool = False
    state: list[keras.Variable] = dataclasses.field(default_factory=list)
    num_terms: int | None = None
    layout: kept_outputs.Layout | None = None
    added_dtype: tf.DType | None = None

    def note_assigned(self, scope: PureScope) -> None:
        """Notes what was assigned inside `scope`.

        Raises:
            Restart: If it is new.
        """
        known = {id(variable) for variable in self.state}
        new = [v for v in scope.assigned if id(v) not in known]
        if new:
            self.state.extend(new)
            raise Restart

    def note_terms(self, num_terms: int) -> None:
        """Notes that denominators are needed.

        Raises:
            Restart: Always.
        """
        self.num_terms = num_terms
        raise Restart

    def note_metrics(self, y_pred: Any) -> None:
        """Notes that outputs are such that metrics do not add up over rows.

        Keras takes means over the last axis. With one number per row that is
        the mean over the batch.

        Raises:
            Restart: If so.
        """
        ranks = [output.shape.rank for output in keras.tree.flatten(y_pred)]
        if any(rank is None or rank < 2 for rank in ranks):
            self.keeps_outputs = True
            raise Restart

    def note_outputs(self, y_pred: Any) -> None:
        """Notes the layout of the outputs, as they are in this trace.

        Raises:
            Restart: If it is new.
        """
        layout = kept_outputs.Layout.of(y_pred)
        if layout != self.layout:
            self.layout = layout
            raise Restart

    def note_added(self, terms: Sequence[tf.Tensor]) -> None:
        """Notes that layers add to the loss.

        Raises:
            Restart: If that is new.
        """
        if terms and self.added_dtype is None:
            self.added_dtype = terms[0].dtype
            raise Restart

    def settle(self, evaluate: Callable[[], T]) -> T:
        """Calls `evaluate` until the plan is complete."""
        while True:
            try:
                return evaluate()
            except Restart:
                continue
