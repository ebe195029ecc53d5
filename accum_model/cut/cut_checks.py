"""Checks of what is cut into micro-batches, and their wording."""

import contextlib
import warnings
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import checks
from accum_model import micro_batch
from accum_model import two_point

LOSS_SCOPES = ("micro_batch", "batch")


def micro_batch_size(value: Any) -> int | str | None:
    """Checks rows per micro-batch."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    try:
        return checks.positive_int("micro_batch_size", value, "")
    except ValueError:
        raise ValueError(
            '`micro_batch_size` must be None, an int >= 1 or "auto". '
            f"{checks.received('micro_batch_size', value)} Pass the rows that "
            'fit the memory, or "auto" to have them found.'
        ) from None


def loss_scope(value: Any, size: int | str | None) -> str:
    """Checks what one loss is taken over."""
    if not isinstance(value, str) or value not in LOSS_SCOPES:
        raise ValueError(
            f"`loss_scope` must be one of {LOSS_SCOPES}. "
            f"{checks.received('loss_scope', value)} "
            'Pass "batch" for a loss that is no sum over rows.'
        )
    if value == "batch" and size is None:
        raise ValueError(
            '`loss_scope` must be "micro_batch" where batches are not cut, '
            "because there one loss is taken over each batch anyway. Received: "
            f"loss_scope={value!r} with micro_batch_size=None. Pass "
            "`micro_batch_size` too, or leave `loss_scope` out."
        )
    return value


def has_own_train_step(model: keras.Model) -> bool:
    """True when the step of `model` is not Keras's."""
    step = type(model).train_step
    is_kerass = step is keras.Model.train_step or hasattr(step, "runs_keras")
    return "train_step" in vars(model) or not is_kerass


def no_own_train_step(model: keras.Model, size: int | str | None) -> None:
    """Refuses to cut batches of a model whose step is not Keras's."""
    if size is not None and has_own_train_step(model):
        raise ValueError(
            "`micro_batch_size` needs Keras's own train_step, because that of "
            f"{type(model).__name__} sees the whole batch. Received: "
            f"micro_batch_size={size!r}. Pass accum_steps instead and fit with "
            "a smaller batch_size, which works with any train_step."
        )


def updates_every_step(
    optimizer: keras.optimizers.Optimizer, accum_steps: int
) -> None:
    """Refuses to accumulate over steps for an optimizer of two points."""
    pair = two_point.find(optimizer)
    if pair is not None and accum_steps > 1:
        raise ValueError(
            f"`accum_steps` must be 1 with {type(pair).__name__}, because its "
            "second gradient needs all rows of an update in one step. "
            f"Received: accum_steps={accum_steps!r}. Pass micro_batch_size "
            "instead and fit with the large batch_size."
        )


def one_per_variable(
    name: str,
    optimizer: keras.optimizers.Optimizer,
    tensors: Any,
    variables: Sequence[keras.Variable],
) -> list[tf.Tensor]:
    """Checks what a method of a two-point optimizer returned."""
    tensors = list(tensors)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    expected = [tuple(variable.shape) for variable in variables]
    if shapes != expected:
        raise ValueError(
            f"`{name}` must return one tensor of each variable's shape. "
            f"Received: shapes {shapes} from {type(optimizer).__name__} for "
            f"variables of shapes {expected}. Return a list in the order of "
            "the variables."
        )
    return tensors


def no_stateful_layer(model: keras.Model, size: int | str) -> None:
    """Refuses to cut the batches of layers that have a state per row."""
    names = [
        layer.name
        for layer in _keras_compat.flat_layers(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
    ]
    if names:
        raise ValueError(
            "`micro_batch_size` needs layers without a state for each row of "
            f"the batch. Received: micro_batch_size={size!r} for stateful "
            f"layers {names}. Pass accum_steps instead and fit with a smaller "
            "batch_size."
        )


def auto_on_one_replica(strategy: tf.distribute.Strategy) -> None:
    """Refuses to search for a size where several replicas train.

    One of them may run out of memory after another has begun to assign.
    """
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            '`micro_batch_size="auto"` needs one replica. Received: '
            f'micro_batch_size="auto" under {type(strategy).__name__} with '
            f"{strategy.num_replicas_in_sync} replicas. Search on one device, "
            "and pass the number that it finds."
        )


def batch_dimension(tensor: tf.Tensor) -> None:
    """Raises if `tensor` is a scalar."""
    if tensor.shape.rank == 0:
        raise ValueError(
            "Each tensor of a batch must have a batch dimension to be cut by "
            "`micro_batch_size`. Received: a tensor of shape "
            f"{tuple(tensor.shape)}. Give it the shape (rows, ...)."
        )


def equal_leading_sizes(
    sizes: Sequence[int | tf.Tensor], can_assert: bool
) -> int | tf.Tensor:
    """Returns the rows that all tensors of a batch have.

    Args:
        sizes: Leading sizes of the tensors.
        can_assert: False inside XLA, which finds out about sizes by itself.

    Raises:
        ValueError: If there are none, or known sizes differ; for others the
            training step raises.
    """
    if not sizes:
        raise ValueError(
            "Training data must hold a tensor. Received: no tensor in the "
            "batch. Check what the data set yields."
        )
    known = [size for size in sizes if isinstance(size, int)]
    if len(set(known)) > 1:
        raise ValueError(
            "All tensors of a batch must have as many rows to be cut by "
            f"`micro_batch_size`. Received: leading sizes {known}. Check what "
            "the data set yields."
        )
    if known:
        return known[0]
    first, *others = sizes
    if not can_assert:
        return first
    checked = [
        tf.debugging.assert_equal(
            other,
            first,
            "All tensors of a batch must have as many rows to be cut by "
            "`micro_batch_size`.",
        )
        for other in others
    ]
    if tf.executing_eagerly() or not checked:
        return first
    with tf.control_dependencies(checked):
        return tf.identity(first)


def losses_of_rows(
    y_pred: Any, terms: Sequence[Any], num_rows: int | tf.Tensor
) -> None:
    """Refuses outputs, and warns of losses, that are not those of rows."""
    for output in keras.tree.flatten(y_pred):
        if isinstance(output, tf.Tensor) and output.shape.rank == 0:
            raise ValueError(
                "Outputs must have one row per row of data to be cut by "
                "`micro_batch_size`. Received: an output of shape (). Have the "
                "model return the shape (rows, ...)."
            )
    if any(
        term.values is not None
        and term.values.shape.rank == 0
        and term.sample_weight is not None
        for term in terms
    ):
        warnings.warn(
            "A loss that returns one number per batch is weighted by "
            "`sample_weight` as a whole, so that of a batch that is cut is not "
            "that of the batch. Have it return one number per row, or pass "
            'loss_scope="batch".',
            stacklevel=2,
        )


@contextlib.contextmanager
def repeatable(model: keras.Model) -> Iterator[None]:
    """Refuses a forward pass that a second one could not repeat.

    Raises:
        ValueError: If it drew random numbers that are not Keras's, as far as a
            graph shows it; or, for a `compute_loss` of the model's own, if it
            stored tensors, of which those of the last micro-batch are left.
    """
    num_before = 0
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        num_before = len(graph.get_operations())
    stored_before = _stored_tensors(model)
    yield
    if not tf.executing_eagerly():
        names = [
            op.name
            for op in graph.get_operations()[num_before:]
            if op.type in _RANDOM_OPS
        ]
        if names:
            raise ValueError(
                '`loss_scope="batch"` needs random numbers that can be drawn '
                "again, because it runs each micro-batch twice. Received: "
                f"TensorFlow's own in {names}. Take keras.random, with a "
                "keras.random.SeedGenerator, instead of tf.random."
            )
    stored = [
        name
        for key, (name, tensor) in _stored_tensors(model).items()
        if key not in stored_before or stored_before[key][1] is not tensor
    ]
    if stored and micro_batch.weighs_itself(model):
        raise ValueError(
            '`loss_scope="batch"` cannot show `compute_loss` what layers have '
            "stored while they were called, because that is of one micro-batch "
            f"only. Received: tensors stored in {stored}. Return them as "
            "outputs of the model, or use add_loss."
        )


# Those that draw from TensorFlow's own generator.
_RANDOM_OPS = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


def _stored_tensors(model):
    return {
        (id(layer), name): (f"{layer.name}.{name}", value)
        for layer in _keras_compat.flat_layers(model)
        for name, value in vars(layer).items()
        if isinstance(value, tf.Tensor)
    }


def dense_output(output: Any) -> None:
    """Raises if outputs of this kind cannot be put together."""
    if not isinstance(output, tf.Tensor):
        raise ValueError(
            "Outputs must be dense tensors where the whole batch of them is "
            'kept, for loss_scope="batch" or a metric of your own. Received: '
            f"an output of type {type(output).__name__}. Have the model return "
            "dense tensors."
        )


def one_row_each(
    output: tf.Tensor, num_rows: int | tf.Tensor, can_assert: bool
) -> tf.Tensor:
    """Returns `output`; raises unless it has one row per row of data."""
    text = (
        "Outputs must have one row per row of data where the whole batch of "
        'them is kept, for loss_scope="batch" or a metric of your own.'
    )
    rank, rows = output.shape.rank, None
    if rank:
        rows = output.shape[0]
    differs = isinstance(num_rows, int) and rows not in (None, num_rows)
    if rank == 0 or differs:
        raise ValueError(
            f"{text} Received: an output of shape {tuple(output.shape)} for a "
            f"micro-batch of {num_rows} rows. Have the model return the shape "
            "(rows, ...)."
        )
    if not can_assert:
        return output
    check = tf.debugging.assert_equal(
        tf.shape(output, out_type="int64")[0], tf.cast(num_rows, "int64"), text
    )
    if check is None:
        return output
    with tf.control_dependencies([check]):
        return tf.identity(output)


def same_setting(name: str, first: str, one: Any, second: str, other: Any):
    """Raises if `name` was given twice with different values."""
    if one != other:
        raise ValueError(
            f"`{name}` must be the same wherever it is given. Received: "
            f"{name}={one!r} ({first}) and {name}={other!r} ({second}). Leave "
            "it out in one of the two places."
        )


def nothing_fits(num_rows: int) -> tf.errors.ResourceExhaustedError:
    """The error for a batch that does not fit even row by row."""
    return tf.errors.ResourceExhaustedError(
        None,
        None,
        '`micro_batch_size="auto"` found no size that fits the memory. '
        f"Received: a batch of {num_rows} rows, which fails even in "
        "micro-batches of 1 row. Make the model or its inputs smaller.",
    )


def update_does_not_fit(num_rows: int) -> tf.errors.ResourceExhaustedError:
    """The error for an update that runs out of memory."""
    return tf.errors.ResourceExhaustedError(
        None,
        None,
        "The memory ran out in the update itself, which no "
        "`micro_batch_size` makes smaller. Received: a batch of "
        f"{num_rows} rows. The update may be half done: go back to the last "
        "checkpoint, with a smaller model or an optimizer with fewer slots.",
    )
