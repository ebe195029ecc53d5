"""The accumulating optimizer, put around that of a compiled model."""

import functools

import keras

from accum_model import _keras_compat
from accum_model import micro_batch
from accum_model import nesting
from accum_model.settings import Settings


def accumulate_outermost(model: keras.Model, settings: Settings) -> None:
    """Puts the accumulating optimizer of `model` around all others."""
    nested = nesting.Nesting(
        model.optimizer, settings.accum_steps, settings.options
    )
    optimizer = nested.outermost
    if optimizer.cycle_position:
        # Collected before, perhaps for weights that are frozen by now.
        optimizer.partial_cycle_is_stale = True
    if settings.accum_steps > 1 and not nested.is_new:
        optimizer.accum_steps = settings.accum_steps
    # For a flush before the first step, of a model that comes from a file.
    optimizer.penalty = functools.partial(micro_batch.weight_penalty, model)
    optimizer.moments.watch(model)
    _keras_compat.set_optimizer(model, optimizer)


def compile_like(
    target: keras.Model, source: keras.Model, settings: Settings
) -> None:
    """Compiles `target` as `source` is, with the same optimizer object."""
    if _keras_compat.has_own_compile(source):
        _keras_compat.share_compiled_state(source, target)
        if source.optimizer is not None:
            accumulate_outermost(target, settings)
        return
    arguments = _keras_compat.compile_arguments(source)
    arguments["optimizer"] = source.optimizer
    target.compile(**arguments)
