"""Every argument of a Keras optimizer, through `compile` and `fit`."""

import contract
import helpers
import keras
import numpy as np
import pytest

from accum_model import SAM
from accum_model import AccumModel
from accum_model import Heun

OPTIMIZERS = {
    **contract.OPTIMIZERS,
    "Heun": lambda **kw: Heun(2**-4, **kw),
    "SAM": lambda **kw: SAM(keras.optimizers.SGD(2**-4, **kw), rho=0.25),
}


def fitted(name, cut=None, **options):
    """Weights after two epochs in batches of 8."""
    model = AccumModel.wrap(helpers.functional(), micro_batch_size=cut)
    model.compile(OPTIMIZERS[name](**options), "mse", run_eagerly=True)
    model.fit(
        *helpers.rows(16), batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("option", contract.OPTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_act_in_fit_and_survive_the_config(name, option):
    """https://github.com/michaelrzhang/lookahead/issues/7"""
    options = contract.OPTIONS[option]
    model, plain = fitted(name, **options), fitted(name)
    if option == "loss_scale_factor":
        helpers.assert_close(model, plain)
    else:
        pairs = zip(helpers.weights(model), helpers.weights(plain), strict=True)
        assert max(np.abs(one - other).max() for one, other in pairs) > 1e-4
    helpers.assert_close(fitted(name, cut=3, **options), model)
    inner = model.optimizer.inner_optimizer
    made = keras.optimizers.deserialize(keras.optimizers.serialize(inner))
    assert made.get_config() == inner.get_config()
