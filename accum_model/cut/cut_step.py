"""A training step on a batch that is cut into micro-batches inside it.

First everything is computed, with no variable changed; then everything is
assigned, with one update. So a step that runs out of memory on the way has not
begun as far as the model can tell.
"""

import warnings
from typing import Any

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import two_point
from accum_model.cut import batch_scope
from accum_model.cut import cut_checks
from accum_model.cut import micro_batch_scope
from accum_model.cut import second_point
from accum_model.cut.chunks import Chunks
from accum_model.cut.cutting import Cutting
from accum_model.cut.evaluation import Evaluation
from accum_model.cut.evaluation import Task
from accum_model.micro_batch import MicroBatch
from accum_model.optimizer import AccumOptimizer


def run(
    model: keras.Model,
    optimizer: AccumOptimizer,
    data: Any,
    cutting: Cutting,
) -> Any:
    """Trains on one batch, as `train_step` does.

    Args:
        model: The model.
        optimizer: Its accumulating optimizer.
        data: The batch, as Keras hands it to `train_step`.
        cutting: How it is cut.

    Returns:
        The logs, as `train_step` returns them.
    """
    cut_checks.updates_every_step(optimizer, optimizer.accum_steps)
    cut_checks.no_stateful_layer(model, cutting.micro_batch_size)
    plan = cutting.plan
    if not plan.is_built:
        _build(model, optimizer, data)
        plan.is_built = True
    by_batch = cutting.loss_scope == "batch"
    if by_batch or not _metrics_add_up(model):
        plan.keeps_outputs = True
    use_xla = bool(model.jit_compile)
    chunks = Chunks(data, cutting.size_for(use_xla), use_xla)
    batch = MicroBatch(tf.cast(chunks.num_rows, "int64"))
    task = Task(model, optimizer, chunks, batch, plan)
    scope = batch_scope if by_batch else micro_batch_scope
    with optimizer.micro_batch(batch), optimizer.moments.collecting(model):
        results = plan.settle(lambda: scope.evaluate(task))
        pair = two_point.find(optimizer)
        if pair is not None:
            results = second_point.evaluate(task, scope.evaluate, pair, results)
        with tf.control_dependencies(_tensors(results)), two_point.served():
            cutting.note_commit()
            return _commit(task, results)


def _commit(task: Task, results: Evaluation) -> Any:
    """Assigns what was computed, and updates."""
    model = task.model
    for variable, value in zip(task.plan.state, results.state, strict=True):
        variable.assign(value)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(task.chunks.data)
    num_rows = _keras_compat.num_static_rows(x)
    for metric, loss in zip(
        task.loss_metrics(), results.output_losses, strict=True
    ):
        # Keras weighs these by the rows where it knows them ahead.
        metric.update_state(loss, sample_weight=num_rows)
    _keras_compat.note_loss(model, results.loss, task.chunks.num_rows)
    if model.trainable_variables:
        task.optimizer.apply_gradients(
            zip(results.gradients, model.trainable_variables, strict=True)
        )
    else:
        warnings.warn(
            "The model does not have any trainable weights.", stacklevel=2
        )
    if task.keeps_outputs:
        return model.compute_metrics(
            x, y, results.outputs, sample_weight=sample_weight
        )
    return model.get_metrics_result()


def _metrics_add_up(model: keras.Model) -> bool:
    """True when metrics may see the micro-batches one by one.

    Those of Keras are sums over rows. A function or class of the user's own
    may take a maximum over the batch, and is shown all of it.
    """
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return False
    return all(
        type(metric).__module__.split(".")[0] == "keras"
        and type(metric) is not keras.metrics.MeanMetricWrapper
        for metric in _keras_compat.compiled_metrics(model)
    )


def _build(model: keras.Model, optimizer: AccumOptimizer, data: Any) -> None:
    """Makes all variables of model, losses, metrics and optimizer.

    A graph that is never run makes them, outside the step that is traced.
    """

    def step(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = _keras_compat.call_for_training(model, x)
        _keras_compat.compute_loss(model, x, y, y_pred, sample_weight)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    specs = tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf),
        data,
    )
    with tf.init_scope():
        if not _keras_compat.is_built(model):
            try:
                tf.function(step, autograph=False).get_concrete_function(specs)
            except Exception:
                if not model.run_eagerly:
                    raise
                # Code of the model that no graph can hold.
                x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
                _keras_compat.build_losses_and_metrics(model, y, model(x))
        if not optimizer.built and model.trainable_variables:
            optimizer.build(model.trainable_variables)


def _tensors(results):
    parts = [results.loss, results.output_losses, results.gradients]
    leaves = keras.tree.flatten([*parts, results.state, results.outputs])
    return [leaf for leaf in leaves if leaf is not None]
