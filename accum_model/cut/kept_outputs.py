"""Outputs of micro-batches, put together to those of the whole batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model.cut import cut_checks


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the outputs of a model are nested, and which of them have masks.

    Attributes:
        structure: The nesting, with a number in the place of each tensor.
        specs: Of the tensors and then of the masks, of any number of rows.
        num_outputs: How many of them are outputs.
        masked: Which outputs have a mask.
    """

    structure: Any
    specs: tuple[tf.TensorSpec, ...]
    num_outputs: int
    masked: tuple[int, ...]

    @classmethod
    def of(cls, y_pred: Any) -> "Layout":
        """The layout of the outputs of a micro-batch.

        Raises:
            ValueError: If an output is not a dense tensor.
        """
        outputs = keras.tree.flatten(y_pred)
        for output in outputs:
            cut_checks.dense_output(output)
        masks = [_keras_compat.keras_mask(output) for output in outputs]
        masked = [j for j, mask in enumerate(masks) if mask is not None]
        tensors = [*outputs, *(masks[j] for j in masked)]
        return cls(
            keras.tree.pack_sequence_as(y_pred, list(range(len(outputs)))),
            tuple(map(_spec, map(tf.convert_to_tensor, tensors))),
            len(outputs),
            tuple(masked),
        )

    def flatten(
        self, y_pred: Any, num_rows: int | tf.Tensor, can_assert: bool
    ) -> list[tf.Tensor]:
        """The tensors and masks of a micro-batch.

        Args:
            y_pred: Outputs of the model.
            num_rows: Rows of the micro-batch.
            can_assert: False inside XLA.

        Raises:
            ValueError: If an output does not have one row per row of data.
        """
        outputs = keras.tree.flatten(y_pred)
        masks = [_keras_compat.keras_mask(outputs[j]) for j in self.masked]
        tensors = list(map(tf.convert_to_tensor, [*outputs, *masks]))
        return [
            cut_checks.one_row_each(tensor, num_rows, can_assert)
            for tensor in tensors
        ]

    def pack(self, tensors: Sequence[tf.Tensor]) -> Any:
        """The outputs of the whole batch, with their masks."""
        outputs = list(tensors[: self.num_outputs])
        masks = tensors[self.num_outputs :]
        for j, mask in zip(self.masked, masks, strict=True):
            _keras_compat.set_keras_mask(outputs[j], mask)
        return keras.tree.pack_sequence_as(self.structure, outputs)


def _spec(tensor):
    # Outside a graph nothing has to be known of the shape, which may be another
    # one in the next step.
    shape = None if tf.executing_eagerly() else [None, *tensor.shape[1:]]
    return tf.TensorSpec(shape, tensor.dtype)
