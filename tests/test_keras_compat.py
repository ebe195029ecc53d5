"""What the package takes from inside Keras is still there.

One test per function of `_keras_compat`, so that a new Keras that breaks the
package says where.
"""

import gc
import weakref

import helpers
import keras
import numpy as np

from accum_model import _keras_compat


def test_functional_class_does_not_move_layer_numbers():
    def number(name):
        return int(name.rsplit("_", maxsplit=1)[1])

    helpers.functional()
    before = number(helpers.functional().name)
    _keras_compat.functional_class.cache_clear()
    assert type(helpers.functional()) is _keras_compat.functional_class()
    assert number(helpers.functional().name) == before + 2


def test_view_shares_layers_and_has_its_own_identity():
    model = helpers.subclassed()
    model.compile("sgd", "mse")
    view = _keras_compat.view_of(model, type(model))
    assert view is not model
    assert not view.compiled
    assert view.hidden is model.hidden
    x = np.ones((2, 5))
    np.testing.assert_array_equal(view(x), model(x))
    view.compile("adam", "mae")
    assert model.loss == "mse"
    assert type(model.optimizer) is keras.optimizers.SGD


def test_compile_arguments_are_the_objects_given():
    optimizer, loss = keras.optimizers.SGD(), keras.losses.MeanSquaredError()
    model = helpers.functional()
    assert _keras_compat.compile_record(model) is None
    model.compile(optimizer, loss)
    arguments = _keras_compat.compile_arguments(model)
    assert arguments["optimizer"] is optimizer
    assert arguments["loss"] is loss
    record = _keras_compat.compile_record(model)
    assert record is _keras_compat.compile_record(model)
    model.compile(optimizer, loss)
    assert record is not _keras_compat.compile_record(model)


def test_recorded_optimizer_is_the_one_saved():
    model = helpers.functional()
    model.compile("sgd", "mse")
    with _keras_compat.record_optimizer(model, keras.optimizers.Adam()):
        config = model.get_compile_config()
        assert config["optimizer"]["class_name"] == "Adam"
    assert model.get_compile_config()["optimizer"]["class_name"] == "SGD"


def test_calling_callback_list_is_found():
    found = []

    class Look(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            found.append(_keras_compat.calling_callback_list(self))

    model = helpers.functional()
    look = Look()
    callbacks = keras.callbacks.CallbackList([look], model=model)
    look.set_model(model)
    assert found == [callbacks, None]


def test_looking_for_the_callback_list_keeps_none_alive():
    class Look(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            _keras_compat.calling_callback_list(self)
            _keras_compat.is_called_twice(self)

    # Without the collector, what stands in a cycle with itself would stay.
    gc.disable()
    try:
        callbacks = keras.callbacks.CallbackList(
            [Look()], model=helpers.functional()
        )
        reference = weakref.ref(callbacks)
        del callbacks
        assert reference() is None
    finally:
        gc.enable()


def test_has_all_variables():
    model = helpers.subclass_of(keras.Model)()
    assert not _keras_compat.has_all_variables(model)
    model(np.ones((1, 5)))
    assert _keras_compat.has_all_variables(model)
    assert _keras_compat.has_all_variables(helpers.functional())


def test_has_own_compile():
    class Own(keras.Model):
        def compile(self, *args, **kwargs):
            super().compile(*args, **kwargs)

    assert _keras_compat.has_own_compile(Own())
    assert not _keras_compat.has_own_compile(helpers.functional())
