"""A search for a counter-example to the promise.

Random small models, row counts, weights, reductions and optimizers; the
reference is plain Keras on each cycle's rows as one batch. A longer search by
hand: ``pytest tests/test_search.py --hypothesis-profile=long``.
"""

import helpers
import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

from accum_model import AccumCallback
from accum_model import AccumModel

LENGTH = 4


def dense_model():
    return helpers.functional()


def conv_model():
    inputs = keras.Input((4, 4, 1))
    hidden = keras.layers.Conv2D(2, 3, activation="tanh")(inputs)
    hidden = keras.layers.Flatten()(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(hidden))
    )


def token_model(recurrent):
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(7, 3, mask_zero=True)(inputs)
    if recurrent:
        hidden = keras.layers.SimpleRNN(3, return_sequences=True)(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(hidden))
    )


def two_output_model():
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    outputs = [keras.layers.Dense(2)(hidden), keras.layers.Dense(2)(hidden)]
    return helpers.with_known_weights(keras.Model(inputs, outputs))


MODELS = {
    "dense": dense_model,
    "conv": conv_model,
    "embedding": lambda: token_model(recurrent=False),
    "recurrent": lambda: token_model(recurrent=True),
    "two outputs": two_output_model,
}

OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.125, **kw),
    "momentum": lambda **kw: keras.optimizers.SGD(0.125, momentum=0.5, **kw),
    "adamw": lambda **kw: keras.optimizers.AdamW(0.0625, 0.125, **kw),
    "rmsprop": lambda **kw: keras.optimizers.RMSprop(0.0625, **kw),
}

CLIPS = [{}, {"clipnorm": 0.1}, {"clipvalue": 0.05}, {"global_clipnorm": 0.1}]


@st.composite
def plans(draw):
    kind = draw(st.sampled_from(sorted(MODELS)))
    has_ids = kind in ("embedding", "recurrent")
    return {
        "kind": kind,
        "sizes": draw(st.lists(st.integers(1, 4), min_size=1, max_size=7)),
        "accum_steps": draw(st.integers(1, 6)),
        "remainder": draw(st.sampled_from(["flush", "carry", "drop"])),
        "way": draw(st.sampled_from(["wrap", "callback"])),
        "reduction": draw(
            st.sampled_from(
                ["sum_over_batch_size", "mean_with_sample_weight", "sum"]
            )
        ),
        "weights": draw(st.sampled_from([None, "some zero", "all zero"])),
        # Plain Keras is a reference for repeated ids with plain SGD only.
        "optimizer": "sgd"
        if has_ids
        else draw(st.sampled_from(sorted(OPTIMIZERS))),
        "clip": {} if has_ids else draw(st.sampled_from(CLIPS)),
        "seed": draw(st.integers(0, 2**16)),
    }


def make_batch(plan, num_rows, rng):
    """Inputs, targets and sample weights (or None) of one micro-batch."""
    has_ids = plan["kind"] in ("embedding", "recurrent")
    if has_ids:
        x = rng.integers(1, 7, (num_rows, LENGTH))
        lengths = rng.integers(0, LENGTH + 1, num_rows)
        x[np.arange(LENGTH) >= lengths[:, None]] = 0
        y = rng.normal(size=(num_rows, LENGTH, 2))
    elif plan["kind"] == "conv":
        x = rng.normal(size=(num_rows, 4, 4, 1))
        y = rng.normal(size=(num_rows, 2))
    else:
        x, y = rng.normal(size=(num_rows, 5)), rng.normal(size=(num_rows, 2))
    weights = None
    if plan["weights"] is not None:
        shape = (num_rows, LENGTH) if has_ids else (num_rows,)
        weights = rng.uniform(0.5, 2.0, shape) * (rng.random(shape) > 0.4)
        if plan["weights"] == "all zero" and rng.random() < 0.5:
            weights = np.zeros(shape)
    if plan["kind"] == "two outputs":
        y = (y, y[:, ::-1])
    return (x, y) if weights is None else (x, y, weights)


def compiled(plan):
    model = MODELS[plan["kind"]]()
    callbacks = []
    if plan["way"] == "wrap":
        ours = AccumModel.wrap(
            MODELS[plan["kind"]](), plan["accum_steps"], plan["remainder"]
        )
    else:
        ours = MODELS[plan["kind"]]()
        callbacks = [
            AccumCallback(plan["accum_steps"], plan["remainder"], verbose=0)
        ]
    for each in (model, ours):
        optimizer = OPTIMIZERS[plan["optimizer"]](**plan["clip"])
        loss = keras.losses.MeanSquaredError(reduction=plan["reduction"])
        each.compile(optimizer, loss, run_eagerly=True)
    return model, ours, callbacks


def has_nothing(plan, rows):
    """True when a cycle's loss is divided by zero: it makes no update."""
    if plan["reduction"] == "sum":
        return False
    valid = np.ones(1)
    if plan["kind"] in ("embedding", "recurrent"):
        valid = rows[0] != 0
    if plan["reduction"] == "mean_with_sample_weight" and len(rows) > 2:
        valid = valid * rows[2]
    return not valid.any()


def check(plan, num_epochs=2):
    """Trains both ways over the same batches and compares the weights."""
    rng = np.random.default_rng(plan["seed"])
    batches = [make_batch(plan, size, rng) for size in plan["sizes"]]
    large, ours, callbacks = compiled(plan)
    for _ in range(num_epochs):
        ours.fit(
            (batch for batch in batches),
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    k = plan["accum_steps"]
    epochs = [batches] * num_epochs
    if plan["remainder"] == "carry":
        epochs = [sum(epochs, [])]
    for epoch in epochs:
        for begin in range(0, len(epoch), k):
            cycle = epoch[begin : begin + k]
            if len(cycle) < k and plan["remainder"] != "flush":
                break
            rows = keras.tree.map_structure(
                lambda *parts: np.concatenate(parts), *cycle
            )
            if k == 1 or not has_nothing(plan, rows):
                large.train_step(rows)
    has_mask = plan["kind"] in ("embedding", "recurrent")
    tolerance = helpers.masked_tolerance() if has_mask else helpers.EXACT
    helpers.assert_close(ours, large, tolerance)


@hypothesis.given(plans())
def test_search_finds_no_difference_from_the_large_batch(plan):
    check(plan)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("kind", ["dense", "embedding"])
@pytest.mark.parametrize("weights", [None, "some zero"])
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"]
)
def test_cross_of_what_users_combine(way, kind, weights, reduction):
    """Way in x reduction x mask or weight x remainder x accum_steps."""
    for remainder in ("flush", "carry", "drop"):
        for accum_steps in (1, 2, 3):
            check(
                {
                    "kind": kind,
                    "sizes": [3, 1, 2, 3, 1],
                    "accum_steps": accum_steps,
                    "remainder": remainder,
                    "way": way,
                    "reduction": reduction,
                    "weights": weights,
                    "optimizer": "sgd",
                    "clip": {},
                    "seed": 7,
                }
            )
