"""Classes that are an `AccumModel` and another kind of model at once.

Made when a model is wrapped or called into being from tensors: the layers are
those of the other kind, `fit` and `compile` those of `AccumModel`.
"""

import functools
from typing import Any

import keras

from accum_model import _keras_compat


@functools.cache
def of(
    root: type[keras.Model],
    accum_class: type[keras.Model],
    model_class: type[keras.Model],
) -> type[keras.Model]:
    """The class that is both an `accum_class` and a `model_class`.

    It goes by the name of `accum_class`, in messages and in saved files.

    Args:
        root: `AccumModel`.
        accum_class: `AccumModel` or a subclass of it.
        model_class: The class of the model whose layers are used.
    """
    body = {
        "__module__": accum_class.__module__,
        "__qualname__": accum_class.__qualname__,
        "__doc__": accum_class.__doc__,
        "_accum_class": accum_class,
        "__reduce__": _reduce,
    }
    if (
        accum_class.__init__ is root.__init__
        and accum_class.get_config is root.get_config
    ):
        body["get_config"] = functools.partialmethod(_get_config, model_class)
    if model_class in (_keras_compat.functional_class(), keras.Sequential):
        bases = (accum_class, model_class)
    else:
        # A train_step of the user's own comes first, and reaches that of
        # AccumModel by super(), as if AccumModel had been its base class.
        bases = (model_class, accum_class)
    cls = type(accum_class.__name__, bases, body)
    registered = keras.saving.get_registered_name(accum_class)
    if ">" in registered:
        package, name = registered.split(">", maxsplit=1)
        for item in (cls, accum_class):  # The last one is what files load.
            keras.saving.register_keras_serializable(package, name)(item)
    return cls


def accum_class_of(cls: type[keras.Model]) -> type[keras.Model]:
    """The `accum_class` that a variant was made of, or the class itself."""
    return getattr(cls, "_accum_class", cls)


def is_variant(cls: type[keras.Model]) -> bool:
    """True for a class made by `of`."""
    return hasattr(cls, "_accum_class")


def _reduce(self: keras.Model) -> tuple[Any, ...]:
    """As Keras pickles a model, by the class that can be imported."""
    load, *rest = super(type(self), self).__reduce__()
    return (getattr(accum_class_of(type(self)), load.__name__), *rest)


def _get_config(
    self: keras.Model, model_class: type[keras.Model]
) -> dict[str, Any]:
    """The config of the model inside, and the settings."""
    plain = _keras_compat.view_of(self, model_class)
    return {
        "model": keras.saving.serialize_keras_object(plain),
        "accum_steps": self.accum_steps,
        **vars(self)["_accum_settings"].get_config(),
    }
