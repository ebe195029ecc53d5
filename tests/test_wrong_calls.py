"""Wrong calls that users make: what each raises, says, and leaves alone.

One table. Each message names the argument in backticks and the rule, then what
was received, then the way out; and the model, the optimizers and the files of
`World` are afterwards what they were before, bit for bit.
"""

import re

import conftest
import helpers
import keras
import numpy as np
import pytest

import accum_model
from accum_model import SAM
from accum_model import AccumBatchNormalization
from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer
from accum_model import AdamAccumulate
from accum_model import AdaptiveGradientClipping
from accum_model import Heun
from accum_model import Lookahead
from accum_model import LookaheadSwap
from accum_model import RAdam
from accum_model import Ranger

X, Y = helpers.rows(8)
ONES = np.ones(2)


def tf_keras_thing():
    """What an object of tf_keras looks like; the package need not be there."""
    return type("Thing", (), {"__module__": "tf_keras.src.something"})()


def built_in():
    """An optimizer that accumulates by Keras's own option."""
    return keras.optimizers.SGD(gradient_accumulation_steps=2)


def unwrapped():
    return helpers.functional()


def wrapped(**kwargs):
    return AccumModel.wrap(helpers.functional(), **kwargs)


def compiled(optimizer):
    model = helpers.functional()
    model.compile(optimizer, "mse")
    return model


# What Keras sets in any `fit`.
OF_KERAS = ("_tracker", "history", "_eval_epoch_iterator")


class World:
    """A plain model, an accumulating one and an optimizer, in mid-cycle."""

    def __init__(self, folder):
        sgd = keras.optimizers.SGD(0.125, momentum=0.5)
        self.plain = compiled(sgd)
        self.plain.train_on_batch(X[:2], Y[:2])
        self.accum = wrapped(accum_steps=3, remainder="carry")
        self.accum.compile("adam", "mse")
        self.accum.train_on_batch(X[:2], Y[:2])
        self.variables = [keras.Variable(np.ones(2)) for _ in range(2)]
        self.optimizer = AccumOptimizer("adam", 3)
        self.optimizer.apply([ONES, ONES], self.variables)
        self.file = folder / "accum.keras"
        self.accum.save(self.file)

    def fit(self, model, *callbacks, **kwargs):
        model.fit(X, Y, batch_size=2, verbose=0, callbacks=callbacks, **kwargs)

    def apply(self, grads, variables=None, **kwargs):
        variables = self.variables if variables is None else variables
        self.optimizer.apply(grads, variables, **kwargs)

    def transformed(self, function):
        """A first update whose gradients `function` is given."""
        made = AccumOptimizer("sgd", gradient_transform=function)
        made.apply([ONES], [keras.Variable(ONES)])

    def arrays(self):
        variables = [
            *self.plain.weights,
            *self.plain.optimizer.variables,
            *self.accum.weights,
            *self.accum.optimizer.variables,
            *self.variables,
            *self.optimizer.variables,
        ]
        file = np.frombuffer(self.file.read_bytes(), "uint8")
        return [*helpers.values(variables), file]

    def things(self):
        found = {}
        for name in ("plain", "accum"):
            model = getattr(self, name)
            found |= {
                (name, key): value
                for key, value in vars(model).items()
                if not key.startswith("_self_") and key not in OF_KERAS
            }
            found[name, "jit"] = model.jit_compile
        for key in ("accum_steps", "remainder", "micro_batch_size"):
            found[key] = getattr(self.accum, key)
        found["steps"] = self.optimizer.accum_steps
        found["files"] = tuple(sorted(self.file.parent.iterdir()))
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """One for all calls: none of them may change it."""
    conftest.use_float("float64")
    keras.utils.set_random_seed(0)
    return World(tmp_path_factory.mktemp("files"))


# What is called; the exception; the argument that its message names.
V, T, R = ValueError, TypeError, RuntimeError
CALLS = {
    # accum_steps, wherever it is taken.
    "wrap 0": (lambda w: wrapped(accum_steps=0), V, "accum_steps"),
    "wrap -1": (lambda w: wrapped(accum_steps=-1), V, "accum_steps"),
    "wrap 1.5": (lambda w: wrapped(accum_steps=1.5), V, "accum_steps"),
    "wrap 4.0": (lambda w: wrapped(accum_steps=4.0), V, "accum_steps"),
    "wrap '4'": (lambda w: wrapped(accum_steps="4"), V, "accum_steps"),
    "wrap True": (lambda w: wrapped(accum_steps=True), V, "accum_steps"),
    "wrap None": (lambda w: wrapped(accum_steps=None), V, "accum_steps"),
    "wrap array": (
        lambda w: wrapped(accum_steps=np.array([4])),
        V,
        "accum_steps",
    ),
    "wrap float32": (
        lambda w: wrapped(accum_steps=np.float32(4)),
        V,
        "accum_steps",
    ),
    "wrap schedule": (
        lambda w: wrapped(accum_steps={0: 1, 5: 4}),
        V,
        "accum_steps",
    ),
    "set 0": (lambda w: setattr(w.accum, "accum_steps", 0), V, "accum_steps"),
    "set '2'": (
        lambda w: setattr(w.accum, "accum_steps", "2"),
        V,
        "accum_steps",
    ),
    "set schedule": (
        lambda w: setattr(w.accum, "accum_steps", {0: 2}),
        V,
        "accum_steps",
    ),
    "optimizer set 0": (
        lambda w: setattr(w.optimizer, "accum_steps", 0),
        V,
        "accum_steps",
    ),
    "optimizer 2.5": (lambda w: AccumOptimizer("sgd", 2.5), V, "accum_steps"),
    "optimizer schedule": (
        lambda w: AccumOptimizer("sgd", {0: 2}),
        V,
        "accum_steps",
    ),
    "callback 0": (lambda w: AccumCallback(0), V, "accum_steps"),
    "callback list": (lambda w: AccumCallback([2, 4]), V, "accum_steps"),
    "callback pairs": (lambda w: AccumCallback([(0, 2)]), V, "accum_steps"),
    "callback flush": (lambda w: AccumCallback("flush"), V, "accum_steps"),
    "callback model": (lambda w: AccumCallback(w.plain), V, "accum_steps"),
    "callback no 0": (lambda w: AccumCallback({3: 4}), V, "accum_steps"),
    "callback empty": (lambda w: AccumCallback({}), V, "accum_steps"),
    "callback value": (lambda w: AccumCallback({0: 2.0}), V, "accum_steps"),
    "callback epoch": (
        lambda w: AccumCallback({0: 2, "3": 4}),
        V,
        "accum_steps",
    ),
    "callback epoch -1": (
        lambda w: AccumCallback({0: 2, -1: 4}),
        V,
        "accum_steps",
    ),
    "iters 0": (lambda w: AdamAccumulate(accum_iters=0), V, "accum_iters"),
    "iters 4.0": (lambda w: AdamAccumulate(accum_iters=4.0), V, "accum_iters"),
    # Two values of accum_steps.
    "model and callback": (
        lambda w: w.fit(w.accum, AccumCallback(4)),
        V,
        "accum_steps",
    ),
    "model and schedule": (
        lambda w: w.fit(w.accum, AccumCallback({0: 2, 1: 4})),
        V,
        "accum_steps",
    ),
    "model and optimizer": (
        lambda w: w.accum.compile(AccumOptimizer("sgd", 4), "mse"),
        V,
        "accum_steps",
    ),
    "model and iters": (
        lambda w: w.accum.compile(AdamAccumulate(accum_iters=2), "mse"),
        V,
        "accum_steps",
    ),
    "optimizer and callback": (
        lambda w: w.fit(compiled(AccumOptimizer("sgd", 2)), AccumCallback(4)),
        V,
        "accum_steps",
    ),
    "wrap and optimizer": (
        lambda w: AccumModel.wrap(compiled(AccumOptimizer("sgd", 2)), 4),
        V,
        "accum_steps",
    ),
    "two callbacks": (
        lambda w: w.fit(w.plain, AccumCallback(2), AccumCallback(2)),
        V,
        "AccumCallback",
    ),
    "options twice": (
        lambda w: w.fit(w.accum, AccumCallback(nonfinite="raise")),
        V,
        "nonfinite",
    ),
    # Accumulation on top of accumulation.
    "built-in inside": (
        lambda w: AccumOptimizer(built_in(), 2),
        V,
        "inner_optimizer",
    ),
    "built-in in model": (
        lambda w: w.accum.compile(built_in(), "mse"),
        V,
        "optimizer",
    ),
    "built-in wrapped": (
        lambda w: AccumModel.wrap(compiled(built_in()), 2),
        V,
        "optimizer",
    ),
    "built-in and callback": (
        lambda w: w.fit(compiled(built_in()), AccumCallback(2)),
        V,
        "optimizer",
    ),
    "built-in and logs": (
        lambda w: w.fit(compiled(built_in()), AccumCallback()),
        V,
        "optimizer",
    ),
    "nested": (lambda w: AccumOptimizer(w.optimizer, 2), V, "inner_optimizer"),
    "nested iters": (
        lambda w: AccumOptimizer(AdamAccumulate(accum_iters=2), 2),
        V,
        "inner_optimizer",
    ),
    "wrapped twice": (lambda w: AccumModel.wrap(w.accum, 3), V, "model"),
    # Models.
    "wrap number first": (lambda w: AccumModel.wrap(4, w.plain), T, "model"),
    "wrap class": (lambda w: AccumModel.wrap(keras.Model, 4), T, "model"),
    "wrap function": (lambda w: AccumModel.wrap(unwrapped, 4), T, "model"),
    "wrap layer": (
        lambda w: AccumModel.wrap(keras.layers.Dense(2), 4),
        T,
        "model",
    ),
    "wrap path": (lambda w: AccumModel.wrap(str(w.file), 4), T, "model"),
    "wrap None model": (lambda w: AccumModel.wrap(None, 4), T, "model"),
    "wrap tf_keras": (
        lambda w: AccumModel.wrap(tf_keras_thing(), 4),
        T,
        "model",
    ),
    "callback tf_keras": (
        lambda w: AccumCallback(2).set_model(tf_keras_thing()),
        T,
        "model",
    ),
    "callback uncompiled": (
        lambda w: AccumCallback(2).set_model(unwrapped()),
        V,
        "AccumCallback",
    ),
    "callback no optimizer": (
        lambda w: AccumCallback(2).set_model(compiled(None)),
        V,
        "AccumCallback",
    ),
    "model of model": (
        lambda w: AccumModel(w.plain, accum_steps=4),
        T,
        "AccumModel",
    ),
    "model of model, 4": (lambda w: AccumModel(w.plain, 4), T, "AccumModel"),
    "model position": (
        lambda w: AccumModel(*helpers.tensors(), 4),
        T,
        "AccumModel",
    ),
    "model typo": (
        lambda w: AccumModel(*helpers.tensors(), accumsteps=4),
        T,
        "accumsteps",
    ),
    "model Keras's name": (
        lambda w: AccumModel(*helpers.tensors(), gradient_accumulation_steps=4),
        T,
        "gradient_accumulation_steps",
    ),
    "compile setting": (
        lambda w: w.accum.compile("sgd", "mse", accum_steps=4),
        T,
        "accum_steps",
    ),
    "fit setting": (
        lambda w: w.accum.fit(X, Y, micro_batch_size=2),
        T,
        "micro_batch_size",
    ),
    # Optimizers.
    "compile rate": (lambda w: w.accum.compile(0.1, "mse"), T, "optimizer"),
    "compile class": (
        lambda w: w.accum.compile(keras.optimizers.Adam, "mse"),
        T,
        "optimizer",
    ),
    "compile unknown": (
        lambda w: w.accum.compile("adamm", "mse"),
        V,
        "optimizer",
    ),
    "compile swapped": (
        lambda w: w.accum.compile("mse", "adam"),
        V,
        "optimizer",
    ),
    "compile tf_keras": (
        lambda w: w.accum.compile(tf_keras_thing(), "mse"),
        T,
        "optimizer",
    ),
    "optimizer swapped": (
        lambda w: AccumOptimizer(4, "sgd"),
        T,
        "inner_optimizer",
    ),
    "optimizer class": (
        lambda w: AccumOptimizer(keras.optimizers.SGD, 4),
        T,
        "inner_optimizer",
    ),
    "optimizer model": (
        lambda w: AccumOptimizer(w.plain, 4),
        T,
        "inner_optimizer",
    ),
    "optimizer config": (
        lambda w: AccumOptimizer({"class_name": "Nothing"}, 4),
        V,
        "inner_optimizer",
    ),
    "optimizer typo": (
        lambda w: AccumOptimizer("sgd", accum_step=4),
        T,
        "accum_step",
    ),
    "optimizer rate": (
        lambda w: AccumOptimizer("sgd", 4, learning_rate=0.1),
        T,
        "learning_rate",
    ),
    "optimizer clipnorm": (
        lambda w: AccumOptimizer("sgd", 4, clipnorm=1.0),
        T,
        "clipnorm",
    ),
    "optimizer remainder": (
        lambda w: AccumOptimizer("sgd", 4, remainder="flush"),
        T,
        "remainder",
    ),
    # What becomes of remainders, of bad gradients; dtypes; logs.
    "remainder": (lambda w: wrapped(remainder="keep"), V, "remainder"),
    "remainder True": (
        lambda w: AccumCallback(2, remainder=True),
        V,
        "remainder",
    ),
    "remainder set": (
        lambda w: setattr(w.accum, "remainder", None),
        V,
        "remainder",
    ),
    "nonfinite": (lambda w: wrapped(nonfinite="skip"), V, "nonfinite"),
    "nonfinite True": (
        lambda w: AccumOptimizer("sgd", 2, nonfinite=True),
        V,
        "nonfinite",
    ),
    "dtype int": (lambda w: wrapped(accum_dtype="int32"), V, "accum_dtype"),
    "dtype half": (
        lambda w: AccumCallback(2, accum_dtype="half"),
        V,
        "accum_dtype",
    ),
    "verbose 2": (lambda w: AccumCallback(2, verbose=2), V, "verbose"),
    "verbose array": (
        lambda w: AccumCallback(2, verbose=np.ones(2)),
        V,
        "verbose",
    ),
    # Gradient transforms.
    "transform name": (
        lambda w: AccumOptimizer("sgd", 2, gradient_transform="clip"),
        T,
        "gradient_transform",
    ),
    "transform number": (
        lambda w: wrapped(gradient_transform=0.01),
        T,
        "gradient_transform",
    ),
    "transform class": (
        lambda w: AccumCallback(2, gradient_transform=AdaptiveGradientClipping),
        T,
        "gradient_transform",
    ),
    "transform of one": (
        lambda w: wrapped(gradient_transform=lambda gradients: gradients),
        T,
        "gradient_transform",
    ),
    "transform None": (
        lambda w: w.transformed(lambda g, v: None),
        V,
        "gradient_transform",
    ),
    "transform short": (
        lambda w: w.transformed(lambda g, v: []),
        V,
        "gradient_transform",
    ),
    "transform shape": (
        lambda w: w.transformed(lambda g, v: [np.ones(3)]),
        V,
        "gradient_transform",
    ),
    "transform items": (
        lambda w: w.transformed(lambda g, v: [None]),
        V,
        "gradient_transform",
    ),
    "clip factor 0": (
        lambda w: AdaptiveGradientClipping(0),
        V,
        "clip_factor",
    ),
    "clip factor str": (
        lambda w: AdaptiveGradientClipping("0.01"),
        V,
        "clip_factor",
    ),
    "clip eps": (lambda w: AdaptiveGradientClipping(0.01, -1), V, "eps"),
    # Calls of apply.
    "apply unbuilt": (
        lambda w: AccumOptimizer("sgd", 2).apply([ONES]),
        V,
        "trainable_variables",
    ),
    "apply too few": (lambda w: w.apply([ONES]), V, "grads"),
    "apply a tensor": (lambda w: w.apply(np.ones((3, 2))), V, "grads"),
    "apply a shape": (lambda w: w.apply([ONES, np.ones(3)]), V, "grads"),
    "apply a broadcast": (lambda w: w.apply([ONES, np.ones(1)]), V, "grads"),
    "apply too few, 1 step": (
        lambda w: AccumOptimizer("sgd").apply([ONES], w.variables),
        V,
        "grads",
    ),
    "apply swapped": (
        lambda w: w.apply(w.variables, [ONES, ONES]),
        T,
        "trainable_variables",
    ),
    "apply to others": (
        lambda w: w.apply([ONES], [keras.Variable(ONES)]),
        V,
        "trainable_variables",
    ),
    "weight -1": (lambda w: w.apply([ONES, ONES], weight=-1), V, "weight"),
    "weight NaN": (lambda w: w.apply([ONES, ONES], weight=np.nan), V, "weight"),
    "weight str": (lambda w: w.apply([ONES, ONES], weight="2"), V, "weight"),
    "weight True": (lambda w: w.apply([ONES, ONES], weight=True), V, "weight"),
    "weight rows": (
        lambda w: w.apply([ONES, ONES], weight=np.ones(8)),
        V,
        "weight",
    ),
    "pairs": (
        lambda w: w.optimizer.apply_gradients([ONES, ONES]),
        V,
        "grads_and_vars",
    ),
    # Cutting.
    "size 0": (lambda w: wrapped(micro_batch_size=0), V, "micro_batch_size"),
    "size Auto": (
        lambda w: AccumCallback(micro_batch_size="Auto"),
        V,
        "micro_batch_size",
    ),
    "size set": (
        lambda w: setattr(w.accum, "micro_batch_size", 2.0),
        V,
        "micro_batch_size",
    ),
    "scope": (
        lambda w: wrapped(micro_batch_size=2, loss_scope="rows"),
        V,
        "loss_scope",
    ),
    "scope alone": (
        lambda w: AccumCallback(loss_scope="batch"),
        V,
        "loss_scope",
    ),
    "scope set": (
        lambda w: setattr(w.accum, "loss_scope", "batch"),
        V,
        "loss_scope",
    ),
    # The optimizers of the package.
    "Lookahead period": (
        lambda w: Lookahead("sgd", sync_period=0),
        V,
        "sync_period",
    ),
    "Lookahead swapped": (lambda w: Lookahead("sgd", 0.5, 5), V, "sync_period"),
    "Lookahead share": (
        lambda w: Lookahead("sgd", slow_step_size=1.5),
        V,
        "slow_step_size",
    ),
    "Lookahead None": (lambda w: Lookahead(None), T, "inner_optimizer"),
    "Lookahead tf_keras": (
        lambda w: Lookahead(tf_keras_thing()),
        T,
        "inner_optimizer",
    ),
    "RAdam beta": (lambda w: RAdam(beta_1=1.0), V, "beta_1"),
    "RAdam epsilon": (lambda w: RAdam(epsilon="a"), V, "epsilon"),
    "RAdam steps": (lambda w: RAdam(total_steps=1.5), V, "total_steps"),
    "RAdam threshold": (lambda w: RAdam(sma_threshold=3), V, "sma_threshold"),
    "Ranger period": (lambda w: Ranger(sync_period=2.5), V, "sync_period"),
    "Ranger share": (lambda w: Ranger(slow_step_size=0), V, "slow_step_size"),
    "Normalisation renorm": (
        lambda w: AccumBatchNormalization(renorm=True),
        V,
        "renorm",
    ),
    "SAM rate first": (lambda w: SAM(0.1), T, "inner_optimizer"),
    "SAM rho": (lambda w: SAM("sgd", rho=0), V, "rho"),
    "SAM steps": (
        lambda w: wrapped(accum_steps=2).compile(SAM("sgd"), "mse"),
        V,
        "accum_steps",
    ),
    "Heun steps": (
        lambda w: w.fit(compiled(Heun(0.1)), AccumCallback(2)),
        V,
        "accum_steps",
    ),
    "Adam decay": (lambda w: AdamAccumulate(decay=-1), V, "decay"),
    "swap without": (
        lambda w: w.fit(w.plain, LookaheadSwap()),
        V,
        "LookaheadSwap",
    ),
    # Arithmetic.
    "rows 8.0": (
        lambda w: accum_model.effective_batch_size(8.0),
        V,
        "batch_size",
    ),
    "rows '8'": (
        lambda w: accum_model.effective_batch_size("8", 2),
        V,
        "batch_size",
    ),
    "replicas 0": (
        lambda w: accum_model.effective_batch_size(8, 2, 0),
        V,
        "num_replicas",
    ),
    "no whole number": (
        lambda w: accum_model.accum_steps_for(64, 7),
        V,
        "effective_batch_size",
    ),
    "sizes swapped": (
        lambda w: accum_model.accum_steps_for(8, 64),
        V,
        "effective_batch_size",
    ),
    "batches None": (
        lambda w: accum_model.updates_per_epoch(None, 4),
        V,
        "num_batches",
    ),
    "updates keep": (
        lambda w: accum_model.updates_per_epoch(8, 4, "keep"),
        V,
        "remainder",
    ),
}

# A sentence with the argument, one with what was received, and the way out.
TEMPLATE = r"`{}`.*[.)a-z] Received: .+\. [A-Z].*\.$"

# Python's own words, which name the argument: keywords that a signature lacks.
SIGNATURES = {
    "wrap typo": lambda: wrapped(accum_step=4),
    "callback typo": lambda: AccumCallback(remainders="flush"),
    "optimizer position": lambda: AccumOptimizer("sgd", 4, "raise"),
    "swap argument": lambda: LookaheadSwap("adam"),
    "clip typo": lambda: AdaptiveGradientClipping(clip=0.01),
    "updates typo": lambda: accum_model.updates_per_epoch(8, 4, drop=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call_is_refused_with_the_way_out(world, name):
    call, error, argument = CALLS[name]
    arrays, things = world.arrays(), world.things()
    with pytest.raises(error) as caught:
        call(world)
    message = str(caught.value)
    assert re.search(
        TEMPLATE.format(re.escape(argument)), message, re.DOTALL
    ), message
    helpers.assert_equal(world.arrays(), arrays)
    after = world.things()
    assert after.keys() == things.keys()
    for key, value in things.items():
        assert after[key] is value or after[key] == value, key


@pytest.mark.parametrize("name", SIGNATURES)
def test_keyword_that_is_not_there_is_pythons_error(name):
    with pytest.raises(TypeError, match="unexpected keyword|positional"):
        SIGNATURES[name]()


def test_every_public_name_is_called_wrongly():
    made = {
        constant
        for call, *_ in CALLS.values()
        for constant in call.__code__.co_names
    }
    helpers_of_table = {"wrapped": "AccumModel", "compiled": "AccumModel"}
    made |= {helpers_of_table[name] for name in made & set(helpers_of_table)}
    public = {name for name in accum_model.__all__ if name[0] != "_"}
    assert public <= made
