"""Every private name of Keras that the package touches, in one place.

Checked on Keras 3.8.0 with TensorFlow 2.18.1, and on Keras 3.15.1 with
TensorFlow 2.21.0. A new release of Keras that breaks the package breaks it
here, and `tests/test_keras_compat.py` says which function.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import keras

# Attributes that `Layer.__new__` sets to closures over the object itself.
_CLOSURES = ("build", "quantize")


@functools.cache
def functional_class() -> type[keras.Model]:
    """The class that Keras gives to `keras.Model(inputs, outputs)`.

    The names are given so that Keras's own numbering of layers, which users
    see, does not move.
    """
    inputs = keras.Input((1,), name="accum_model_probe")
    return type(keras.Model(inputs, inputs, name="accum_model_probe_model"))


def view_of(model: keras.Model, cls: type[keras.Model]) -> keras.Model:
    """A second model object of class `cls` around the same layers.

    The view has its own identity, and shares layers, variables and graph with
    `model`: paths, `summary()` and weight files are the same. It is not
    compiled and holds no compiled functions.
    """
    view = cls.__new__(cls)
    for name, value in vars(model).items():
        if name in _CLOSURES:
            continue
        if name.startswith("_self_"):
            # TensorFlow's own list of what an object depends on: shared, it
            # would make checkpoints of one object follow the other.
            value = copy.copy(value)
        vars(view)[name] = value
    vars(view).update(
        train_function=None,
        test_function=None,
        predict_function=None,
        compiled=False,
        loss=None,
        _compile_loss=None,
        _compile_metrics=None,
        _loss_tracker=None,
    )
    for name in ("optimizer", "_compile_config"):
        vars(view).pop(name, None)
    return view


def share_compiled_state(source: keras.Model, target: keras.Model) -> None:
    """Gives `target` all that `source.compile` has set, by reference.

    For a model class with a `compile` of its own, which cannot be called again
    because the arguments it was called with are not known.
    """
    for name, value in vars(source).items():
        if name not in _CLOSURES and not name.startswith("_self_"):
            vars(target)[name] = value
    vars(target).update(
        train_function=None, test_function=None, predict_function=None
    )


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments `model.compile` was called with, as objects."""
    return dict(model._compile_config.config)


def compile_record(model: keras.Model) -> object:
    """An object that is another one after each call of `model.compile`."""
    return getattr(model, "_compile_config", None)


@contextlib.contextmanager
def _recorded_optimizer(model, optimizer):
    config = model._compile_config.config
    before = config["optimizer"]
    config["optimizer"] = optimizer
    try:
        yield
    finally:
        config["optimizer"] = before


def record_optimizer(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> contextlib.ExitStack:
    """Makes saved files of `model` name `optimizer`, until the stack closes.

    A `.keras` file names the optimizer that `compile` was called with. A file
    written while another one trains the model would lose that one's state.
    """
    stack = contextlib.ExitStack()
    if hasattr(model, "_compile_config"):
        stack.enter_context(_recorded_optimizer(model, optimizer))
    return stack


def keras_mask(tensor: Any) -> Any:
    """The mask that Keras has put on a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Puts a mask on a tensor, where losses and metrics look for it."""
    tensor._keras_mask = mask


def set_optimizer(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None
) -> None:
    """Sets `model.optimizer` as `compile` does: without tracking it.

    TensorFlow would otherwise list the optimizer among the objects that a
    checkpoint of the model follows, which it does not for a plain model.
    """
    vars(model)["optimizer"] = optimizer


def without_reduction(
    optimizer: keras.optimizers.Optimizer,
) -> contextlib.AbstractContextManager[None]:
    """A block in which `optimizer` takes gradients for those of all replicas.

    It would otherwise sum them over the replicas, after it has clipped each
    replica's own.
    """
    return instance_attribute(
        optimizer, "_all_reduce_sum_gradients", lambda pairs: list(pairs)
    )


def building_on_replicas(
    model: keras.Model,
) -> contextlib.AbstractContextManager[None]:
    """A block in which Keras can build `model` where several replicas train.

    Keras adds up the replicas' first batches, and fails where they differ in
    their rows or are on several machines. One of them is enough to build from.
    Public report: keras-team/keras#20582.
    """
    strategy = model.distribute_strategy

    def build(iterator=None, data_batch=None):
        if iterator is not None:
            for *_, batches in iterator:
                data_batch = keras.tree.map_structure(
                    lambda each: strategy.experimental_local_results(each)[0],
                    next(batches),
                )
                break
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)

    return instance_attribute(model, "_maybe_symbolic_build", build)


def calling_callback_list(
    callback: keras.callbacks.Callback,
) -> keras.callbacks.CallbackList | None:
    """The callback list that is handing its model to `callback` now.

    Keras tells a callback its model but not its list. The list is found among
    the callers; None when the callback is driven by hand.
    """
    return next(_callback_lists(callback), None)


def is_called_twice(callback: keras.callbacks.Callback) -> bool:
    """True when a second list, inside a hook of a first one, has `callback`."""
    found = {id(each) for each in _callback_lists(callback)}
    return len(found) > 1


def _callback_lists(callback):
    """The lists with `callback` among the callers, innermost first."""
    # Not the frame of this generator: Python 3.12 and older would make it a
    # part of its own locals, and keep the lists until garbage is collected.
    frame = inspect.currentframe().f_back
    try:
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.callbacks.CallbackList):
                if any(item is callback for item in owner.callbacks):
                    yield owner
            frame = frame.f_back
    finally:
        del frame


def has_all_variables(model: keras.Model) -> bool:
    """True when no layer of `model` will make variables at its first call."""
    return all(layer.built for layer in model._flatten_layers())


def has_own_compile(model: keras.Model) -> bool:
    """True when the class of `model` overrides `compile`."""
    return type(model).compile is not keras.Model.compile


@contextlib.contextmanager
def instance_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Shadows the method `name` of `owner` for the time of the block."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if had:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]


def flat_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """`model` and all layers in it, at any depth."""
    return model._flatten_layers()


def is_built(model: keras.Model) -> bool:
    """True when one more step would make no variable of model or metrics."""
    parts = (model._compile_loss, model._compile_metrics)
    return has_all_variables(model) and all(
        part is None or part.built for part in parts
    )


def build_losses_and_metrics(model: keras.Model, y: Any, y_pred: Any) -> None:
    """Makes the variables of compiled losses and metrics."""
    for part in (model._compile_loss, model._compile_metrics):
        if part is not None and not part.built:
            part.build(y, y_pred)


def call_for_training(model: keras.Model, x: Any) -> Any:
    """Calls `model` on `x` as a training step does."""
    if model._call_has_training_arg:
        return model(x, training=True)
    return model(x)


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> Any:
    """Calls `compute_loss`, with `training=True` where it takes that."""
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
    )


def note_loss(model: keras.Model, loss: Any, num_rows: Any) -> None:
    """Adds the loss of a batch to the mean that Keras shows as `loss`.

    Of several replicas each has its share of the loss.
    """
    loss *= model.distribute_strategy.num_replicas_in_sync
    model._loss_tracker.update_state(loss, sample_weight=num_rows)


def output_loss_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The means of the losses of single outputs, of models with several."""
    compile_loss = model._compile_loss
    return [] if compile_loss is None else list(compile_loss.metrics)


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that `compile` was given, once they are built."""
    metrics = model._compile_metrics
    return [] if metrics is None else list(metrics.metrics)


def clear_losses(model: keras.Model) -> None:
    """Forgets what layers have added with `add_loss`."""
    model._clear_losses()


def num_static_rows(x: Any) -> int | None:
    """Rows of a batch as far as Keras knows them when it traces a step."""
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return first.shape[0]
