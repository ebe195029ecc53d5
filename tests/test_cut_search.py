"""A search for a batch that is not the same once it is cut.

Random nestings of inputs and outputs, masks, weights, reductions, penalties,
rows and sizes; the reference is plain Keras on the uncut batch. A longer search
by hand: ``pytest tests/test_cut_search.py --hypothesis-profile=long``.
"""

import helpers
import hypothesis
import keras
import numpy as np
import tensorflow as tf
import test_search
from hypothesis import strategies as st

from accum_model import AccumModel

LENGTH = 3
NUM_TOKENS = 6
NESTINGS = ["one", "list", "tuple", "dict"]
REDUCTIONS = ["sum", "mean_with_sample_weight", "sum_over_batch_size"]


@st.composite
def plans(draw):
    inputs = draw(
        st.lists(
            st.sampled_from(["dense", "tokens", "sparse"]),
            min_size=1,
            max_size=3,
        )
    )
    has_ids = "tokens" in inputs
    heads = ["rows", "tokens"] if has_ids else ["rows"]
    outputs = draw(st.lists(st.sampled_from(heads), min_size=1, max_size=3))
    accum_steps = 1
    if len(outputs) == 1:  # Of several, only a step knows what each divides by.
        accum_steps = draw(st.integers(1, 2))
    num_rows = draw(st.integers(2, 9))
    nest = lambda parts: draw(st.sampled_from(NESTINGS[len(parts) > 1 :]))
    return {
        "inputs": inputs,
        "outputs": outputs,
        "input_nesting": nest(inputs),
        "output_nesting": nest(outputs),
        "rows": num_rows,
        "size": draw(st.integers(1, num_rows - 1)),
        "accum_steps": accum_steps,
        "loss_scope": draw(st.sampled_from(["micro_batch"] * 2 + ["batch"])),
        "reductions": [draw(st.sampled_from(REDUCTIONS)) for _ in outputs],
        "are_weighted": [draw(st.booleans()) for _ in outputs],
        "is_penalised": draw(st.booleans()),
        # Plain Keras is a reference for repeated ids with plain SGD only.
        "optimizer": "sgd"
        if has_ids
        else draw(st.sampled_from(sorted(test_search.OPTIMIZERS))),
        "clip": {} if has_ids else draw(st.sampled_from(test_search.CLIPS)),
        "seed": draw(st.integers(0, 2**16)),
    }


def nested(kind, parts, name):
    """`parts` as a structure: itself, a list, a tuple or a dict."""
    if kind == "dict":
        return {f"{name}_{j}": part for j, part in enumerate(parts)}
    return (
        parts[0]
        if kind == "one"
        else {"list": list, "tuple": tuple}[kind](parts)
    )


def make_model(plan):
    inputs, rows, tokens = [], [], None
    penalty = keras.regularizers.L2(0.125) if plan["is_penalised"] else None
    for j, kind in enumerate(plan["inputs"]):
        name = f"in_{j}"
        if kind == "tokens":
            inputs.append(keras.Input((LENGTH,), dtype="int32", name=name))
            embed = keras.layers.Embedding(NUM_TOKENS, 2, mask_zero=True)
            hidden = embed(inputs[-1])
            tokens = hidden if tokens is None else tokens
            rows.append(keras.ops.mean(hidden, axis=1))
        else:
            is_sparse = kind == "sparse"
            inputs.append(keras.Input((4,), sparse=is_sparse, name=name))
            rows.append(keras.layers.Dense(2, activation="tanh")(inputs[-1]))
    hidden = rows[0]
    if len(rows) > 1:
        hidden = keras.layers.Concatenate()(rows)
    outputs = [
        keras.layers.Dense(2, name=f"out_{j}", kernel_regularizer=penalty)(
            tokens if kind == "tokens" else hidden
        )
        for j, kind in enumerate(plan["outputs"])
    ]
    return helpers.with_known_weights(
        keras.Model(
            nested(plan["input_nesting"], inputs, "in"),
            nested(plan["output_nesting"], outputs, "out"),
        )
    )


def make_batch(plan, rng):
    """Inputs, targets and weights; something in each of them counts."""
    num_rows = plan["rows"]
    inputs = []
    for kind in plan["inputs"]:
        if kind == "tokens":
            ids = rng.integers(1, NUM_TOKENS, (num_rows, LENGTH))
            lengths = rng.integers(0, LENGTH + 1, num_rows)
            lengths[rng.integers(num_rows)] = LENGTH
            ids[np.arange(LENGTH) >= lengths[:, None]] = 0
            inputs.append(ids)
        else:
            inputs.append(rng.normal(size=(num_rows, 4)))
    targets, weights = [], []
    for kind, is_weighted in zip(
        plan["outputs"], plan["are_weighted"], strict=True
    ):
        shape = (num_rows, LENGTH) if kind == "tokens" else (num_rows,)
        targets.append(rng.normal(size=(*shape, 2)))
        weight = rng.uniform(0.5, 2.0, shape) * (rng.random(shape) > 0.4)
        if not weight[_valid(plan, inputs, kind)].any():
            weight = np.ones(shape)
        weights.append(weight if is_weighted else None)
    return inputs, targets, weights


def _valid(plan, inputs, kind):
    if kind != "tokens":
        return slice(None)
    return inputs[plan["inputs"].index("tokens")] != 0


def as_data(plan, batch):
    """The batch as `train_step` receives it."""
    inputs, targets, weights = batch
    inputs = [
        tf.sparse.from_dense(part) if kind == "sparse" else tf.constant(part)
        for part, kind in zip(inputs, plan["inputs"], strict=True)
    ]
    targets = list(map(tf.constant, targets))
    weights = [None if w is None else tf.constant(w) for w in weights]
    data = [
        nested(plan["input_nesting"], inputs, "in"),
        nested(plan["output_nesting"], targets, "out"),
    ]
    if any(weight is not None for weight in weights):
        data.append(nested(plan["output_nesting"], weights, "out"))
    return tuple(data)


def compile_as(plan, model):
    losses = [
        keras.losses.MeanSquaredError(reduction=reduction)
        for reduction in plan["reductions"]
    ]
    kind = "list" if plan["output_nesting"] == "tuple" else None
    model.compile(
        test_search.OPTIMIZERS[plan["optimizer"]](**plan["clip"]),
        nested(kind or plan["output_nesting"], losses, "out"),
        run_eagerly=True,
    )
    return model


def check(plan):
    rng = np.random.default_rng(plan["seed"])
    batches = [make_batch(plan, rng) for _ in range(2)]
    plain = compile_as(plan, make_model(plan))
    ours = compile_as(
        plan,
        AccumModel.wrap(
            make_model(plan),
            plan["accum_steps"],
            micro_batch_size=plan["size"],
            loss_scope=plan["loss_scope"],
        ),
    )
    tolerance = helpers.EXACT
    if "tokens" in plan["outputs"]:
        tolerance = helpers.masked_tolerance()
    for batch in batches:
        logs = ours.train_step(as_data(plan, batch))
        if plan["accum_steps"] > 1:
            continue
        expected = plain.train_step(as_data(plan, batch))
        for name, value in expected.items():
            np.testing.assert_allclose(
                logs[name], value, rtol=0, atol=tolerance, err_msg=name
            )
    if plan["accum_steps"] > 1:
        large = [
            [
                None if parts[0] is None else np.concatenate(parts)
                for parts in zip(*group, strict=True)
            ]
            for group in zip(*batches, strict=True)
        ]
        plain.train_step(as_data(plan, large))
    helpers.assert_close(ours, plain, tolerance)
    assert int(ours.optimizer.iterations) == int(plain.optimizer.iterations)
    assert all(np.isfinite(weight).all() for weight in helpers.weights(ours))


@hypothesis.given(plans())
def test_search_finds_no_difference_from_the_uncut_batch(plan):
    check(plan)
