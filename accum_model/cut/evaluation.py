"""What one step computes before it changes anything.

The loss of a whole batch and its gradient, from one micro-batch at a time:
`micro_batch_scope` adds up the losses of micro-batches, `batch_scope` takes one
loss over all outputs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import shadow
from accum_model.cut import chunk_loop
from accum_model.cut.chunks import Chunks
from accum_model.cut.plan import Plan
from accum_model.cut.pure_state import PureScope
from accum_model.micro_batch import MicroBatch
from accum_model.optimizer import AccumOptimizer


@dataclasses.dataclass(frozen=True)
class Task:
    """One step to be evaluated.

    Attributes:
        model: The model.
        optimizer: Its accumulating optimizer.
        chunks: The batch, cut into micro-batches.
        batch: Where the weight of the batch is noted for the optimizer.
        plan: What is known of the step.
        displacement: What is added to the trainable variables, one tensor
            each, for the gradient at a second point; None at the first.
    """

    model: keras.Model
    optimizer: AccumOptimizer
    chunks: Chunks
    batch: MicroBatch
    plan: Plan
    displacement: Sequence[tf.Tensor] | None = None

    @property
    def keeps_outputs(self) -> bool:
        """True when metrics are to see the outputs of the whole batch."""
        return self.is_measured and self.plan.keeps_outputs

    @property
    def is_measured(self) -> bool:
        """True when metrics are told of it."""
        return self.displacement is None

    def loop(
        self,
        body: chunk_loop.Body,
        carry: Any,
        kept: Sequence[tf.TensorSpec] = (),
    ) -> tuple[Any, list[tf.Tensor]]:
        """Runs `body` on each micro-batch, see `chunk_loop.run`."""
        return chunk_loop.run(self.chunks, body, carry, kept)

    def at(self, displacement: Sequence[tf.Tensor]) -> "Task":
        """The same at displaced weights."""
        return dataclasses.replace(self, displacement=displacement)

    def of_data(self, data: Any) -> "Task":
        """The same with other data of as many rows."""
        chunks = Chunks(data, self.chunks.size, self.chunks.use_xla)
        return dataclasses.replace(self, chunks=chunks)

    def keep(self, y_pred: Any, num_rows: tf.Tensor) -> list[tf.Tensor]:
        """The outputs of a micro-batch, to be kept."""
        self.plan.note_outputs(y_pred)
        return self.plan.layout.flatten(
            y_pred, num_rows, can_assert=not self.chunks.use_xla
        )

    def scope(self, values: Sequence[tf.Tensor]) -> PureScope:
        """A scope in which the state of the plan has these values."""
        return PureScope(self.model, self.plan.state, values, self.displacement)

    def first_state(self) -> list[tf.Tensor]:
        """The values of the state before the step."""
        return [tf.convert_to_tensor(v.value) for v in self.plan.state]

    def loss_metrics(self) -> list[keras.metrics.Metric]:
        """The means of the losses of single outputs."""
        return _keras_compat.output_loss_metrics(self.model)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of a step, for its update.

    Attributes:
        loss: Scalar, float64.
        output_losses: Losses of single outputs, scalars, one for each of
            `Task.loss_metrics`.
        gradients: Of the scaled loss, one per trainable variable, or None.
        state: Values of the variables that the step assigns.
        outputs: Of the whole batch, if they were kept.
    """

    loss: tf.Tensor
    output_losses: list[tf.Tensor]
    gradients: list[tf.Tensor | None]
    state: list[tf.Tensor]
    outputs: Any = None


@contextlib.contextmanager
def caught_losses(
    metrics: Sequence[keras.metrics.Metric],
) -> Iterator[dict[int, tf.Tensor]]:
    """Catches what single outputs' losses tell their metrics in the block.

    Keras takes their means over batches, so they are told once per batch.

    Returns:
        The losses by the position of their metric.
    """
    caught: dict[int, tf.Tensor] = {}

    def catch(position, update_state, value, sample_weight=None):
        caught[position] = value

    with contextlib.ExitStack() as stack:
        for position, metric in enumerate(metrics):
            catch_one = functools.partial(catch, position)
            stack.enter_context(
                shadow.method(metric, "update_state", catch_one)
            )
        yield caught
