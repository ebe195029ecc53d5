"""One training step, shared by `AccumModel` and `AccumCallback`.

The step itself is the model's own, Keras's or written by its author. What is
added is the weight of the micro-batch, which the optimizer picks up.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from accum_model import _keras_compat
from accum_model import batch_statistics
from accum_model import data_rows
from accum_model import distributed_step
from accum_model import micro_batch
from accum_model import two_point
from accum_model.cut import auto_size
from accum_model.cut import cut_checks
from accum_model.cut import cut_step
from accum_model.cut.cutting import Cutting
from accum_model.cut.plan import Plan
from accum_model.optimizer import AccumOptimizer

Step = Callable[[Any], Any]


def run(model: keras.Model, step: Step, cutting: Cutting, data: Any) -> Any:
    """Trains on one batch of data.

    In one piece, by `step`, it is one micro-batch, weighted by its loss's
    denominator.

    Args:
        model: The model that `step` trains.
        step: Its training step, `step(data)`.
        cutting: How batches are cut.
        data: The batch, as Keras hands it to `train_step`.

    Returns:
        What `step` returns.
    """
    optimizer = model.optimizer
    if not isinstance(optimizer, AccumOptimizer):
        return step(data)
    if optimizer.is_in_micro_batch:  # A train_step that calls another.
        return step(data)
    if cutting.cuts or _takes_two_points(model):
        return cut_step.run(model, optimizer, data, cutting)
    weighs = optimizer.is_accumulating or optimizer.replicas.are_several
    if not (weighs or optimizer.counts_rows):
        return step(data)
    batch = micro_batch.MicroBatch(data_rows.num_rows(data))
    with contextlib.ExitStack() as stack:
        stack.enter_context(optimizer.micro_batch(batch))
        if weighs:
            optimizer.penalty = functools.partial(
                micro_batch.weight_penalty, model
            )
            stack.enter_context(batch.watch(model))
            stack.enter_context(optimizer.moments.collecting(model))
        return step(data)


def _takes_two_points(model: keras.Model) -> bool:
    if two_point.find(model.optimizer) is None:
        return False
    return not cut_checks.has_own_train_step(model)


def compile_into(
    model: keras.Model,
    make_train_function: Callable[..., Any],
    force: bool,
    cutting: Cutting,
) -> Any:
    """Calls `make_train_function` so that it compiles `run`.

    Keras compiles the method it finds under `train_step`, which therefore is
    shadowed for the time of the call, and only for that.

    Args:
        model: The model to be trained.
        make_train_function: Keras's method of that name.
        force: True to compile a step that is compiled already.
        cutting: How batches are cut.
    """
    if model.train_function is not None and not force:
        return model.train_function
    optimizer = model.optimizer
    if isinstance(optimizer, AccumOptimizer) and not optimizer.built:
        optimizer.moments.watch(model)
        if _keras_compat.has_all_variables(model) and model.trainable_weights:
            # A step that makes variables while it is traced is traced twice.
            optimizer.build(model.trainable_variables)
    step = functools.partial(run, model, model.train_step, cutting)

    def compile_step():
        if distributed_step.are_needed(model.distribute_strategy):
            return distributed_step.make(model, step)
        before = model.train_function
        with _keras_compat.instance_attribute(model, "train_step", step):
            make_train_function(force=True)
        function, model.train_function = model.train_function, before
        return function

    cutting.plan = Plan()
    if cutting.size is not None:
        batch_statistics.warn_once(model, f"micro_batch_size={cutting.size}")
    if isinstance(optimizer, AccumOptimizer) and optimizer.accum_steps > 1:
        batch_statistics.warn_once(
            model, f"accum_steps={optimizer.accum_steps}"
        )
    if cutting.is_auto:
        cut_checks.auto_on_one_replica(model.distribute_strategy)
        function = auto_size.retrying(cutting, compile_step, model)
    else:
        function = compile_step()
    model.train_function = function
    return function
