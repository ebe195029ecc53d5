"""AccumOptimizer by itself: the ledger, missing gradients, lists, config."""

import inspect
import warnings

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumOptimizer
from accum_model import Lookahead


def make_variables(*shapes, dtype=None):
    rng = np.random.default_rng(3)
    return [
        keras.Variable(rng.normal(size=shape), dtype=dtype) for shape in shapes
    ]


def gradients_for(variables, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.shape) for v in variables]


def sums_of(optimizer):
    return [v.numpy() for v in optimizer.variables if "gradient_sum" in v.name]


def in_graph(optimizer, variables, weight=None, **kwargs):
    """`apply` as a compiled function of the gradients."""

    @tf.function(**kwargs)
    def step(gradients):
        optimizer.apply(gradients, variables, weight)

    return lambda gradients: step([tf.constant(g) for g in gradients])


@pytest.mark.parametrize("inner", ["adam", "sgd_momentum"])
@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_ledger_after_every_micro_batch(inner, how):
    """Between updates only the accumulator changes, bit by bit.

    https://github.com/keras-team/keras/issues/14829
    https://github.com/IndicoDataSolutions/finetune/pull/243
    """
    inner = {
        "adam": keras.optimizers.Adam(0.1),
        "sgd_momentum": keras.optimizers.SGD(0.1, momentum=0.9),
    }[inner]
    variables = make_variables((2, 3), (3,))
    optimizer = AccumOptimizer(inner, accum_steps=4)
    optimizer.build(variables)
    step = {
        "eager": lambda g: optimizer.apply(g, variables),
        "graph": in_graph(optimizer, variables),
        "xla": in_graph(optimizer, variables, jit_compile=True),
    }[how]
    updated_at = []
    collected = [np.zeros(v.shape) for v in variables]
    for index in range(12):
        weights_before = helpers.values(variables)
        slots_before = helpers.values(inner.variables)
        gradients = gradients_for(variables, seed=index)
        step(gradients)
        collected = [s + g for s, g in zip(collected, gradients, strict=True)]
        if (index + 1) % 4 == 0:
            collected = [np.zeros_like(s) for s in collected]
        else:
            helpers.assert_equal(helpers.values(variables), weights_before)
            helpers.assert_equal(helpers.values(inner.variables), slots_before)
        if not np.array_equal(variables[0].numpy(), weights_before[0]):
            updated_at.append(index)
        helpers.assert_close(sums_of(optimizer), collected)
        assert optimizer.cycle_position == (index + 1) % 4
        assert optimizer.num_micro_batches == index + 1
        assert int(optimizer.iterations) == (index + 1) // 4
        assert int(inner.iterations) == (index + 1) // 4
    assert updated_at == [3, 7, 11]


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_buffers_hold_the_sum_of_gradients(how):
    """https://github.com/tensorflow/addons/pull/2525"""
    variables = make_variables((4,))
    optimizer = AccumOptimizer("sgd", accum_steps=3)
    kwargs = {"jit_compile": True} if how == "xla" else {}
    step = in_graph(optimizer, variables, **kwargs)
    if how == "eager":
        step = lambda g: optimizer.apply(g, variables)
    first, second = (gradients_for(variables, seed) for seed in (0, 1))
    step(first)
    step(second)
    helpers.assert_close(sums_of(optimizer), [first[0] + second[0]])


def test_update_equals_inner_optimizer_on_weighted_mean():
    variables, reference = make_variables((3, 2)), make_variables((3, 2))
    optimizer = AccumOptimizer(keras.optimizers.Adam(0.1), accum_steps=3)
    plain = keras.optimizers.Adam(0.1)
    for cycle in range(3):
        numerator = 0.0
        for index, weight in enumerate((4.0, 4.0, 2.0)):
            gradient = gradients_for(variables, seed=10 * cycle + index)[0]
            optimizer.apply([gradient], variables, weight=weight)
            numerator = numerator + weight * gradient
        plain.apply([numerator / 10.0], reference)
        helpers.assert_close(
            helpers.values(variables), helpers.values(reference)
        )


def test_buffers_are_one_float32_array_per_variable_whatever_accum_steps():
    """https://github.com/bojone/bert4keras/issues/477"""
    for accum_steps in (2, 16):
        variables = make_variables((8, 4), (4,), (), dtype="float32")
        inner = keras.optimizers.Adam()
        optimizer = AccumOptimizer(inner, accum_steps)
        optimizer.build(variables)
        inner_ids = {id(v) for v in inner.variables}
        own = [v for v in optimizer.variables if id(v) not in inner_ids]
        sums = [v for v in own if "gradient_sum" in v.name]
        assert [v.shape for v in sums] == [(8, 4), (4,), ()]
        assert {v.dtype for v in sums} == {"float32"}
        assert all(v.shape == () for v in own if "gradient_sum" not in v.name)
        num_before = len(optimizer.variables)
        step = in_graph(optimizer, variables)
        for index in range(20):
            step([g.astype("float32") for g in gradients_for(variables, index)])
        assert len(optimizer.variables) == num_before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_variables_have_float32_buffers(dtype):
    variable = keras.Variable(np.ones(3), dtype=dtype)
    optimizer = AccumOptimizer("sgd", 2)
    optimizer.build([variable])
    sums = [v for v in optimizer.variables if "gradient_sum" in v.name]
    assert [v.dtype for v in sums] == ["float32"]


def test_one_accum_step_makes_no_variable():
    variables = make_variables((2,))
    optimizer = AccumOptimizer("adam", 1)
    optimizer.apply(gradients_for(variables, 0), variables)
    inner = optimizer.inner_optimizer.variables
    assert [v.path for v in optimizer.variables] == [v.path for v in inner]
    assert optimizer.num_micro_batches == int(optimizer.iterations) == 1
    assert optimizer.cycle_position == 0


def test_update_is_one_conditional_for_many_variables():
    """https://github.com/tensorflow/addons/issues/2735"""
    variables = make_variables(*[(2,)] * 100)
    optimizer = AccumOptimizer("sgd", 2)
    optimizer.build(variables)

    @tf.function
    def step(gradients):
        optimizer.apply(gradients, variables)

    graph = step.get_concrete_function(
        [tf.TensorSpec((2,), "float64")] * 100
    ).graph
    types = [operation.type for operation in graph.get_operations()]
    for function in graph.as_graph_def().library.function:
        types += [node.op for node in function.node_def]
    assert sum(kind in ("If", "StatelessIf") for kind in types) == 1


def test_autograph_converts_nothing_of_an_optimizer():
    """https://github.com/tensorflow/addons/issues/2735"""
    files = set()

    def transform(gradients, variables):
        files.update(frame.filename for frame in inspect.stack(0))
        return gradients

    variables = make_variables((2,))
    optimizer = AccumOptimizer(
        Lookahead("sgd"), 2, gradient_transform=transform
    )
    optimizer.build(variables)

    @tf.function
    def step(gradient):
        optimizer.apply_gradients(zip([gradient], variables, strict=True))

    step.get_concrete_function(tf.TensorSpec((2,), "float64"))
    generated = [name for name in files if "autograph_generated" in name]
    assert len(generated) <= 1, generated  # That of `step`.


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_missing_gradient_on_last_micro_batch_loses_nothing(how):
    """What was collected is applied, divided by the weight of all."""
    variables, reference = (
        make_variables((2,), (3,)),
        make_variables((2,), (3,)),
    )
    optimizer = AccumOptimizer(keras.optimizers.Adam(0.1), 2)
    plain = keras.optimizers.Adam(0.1)
    kwargs = {"jit_compile": True} if how == "xla" else {}
    wrap = (lambda f: f) if how == "eager" else tf.function(**kwargs)

    @wrap
    def both(a, b):
        optimizer.apply([a, b], variables)

    @wrap
    def only_first(a):
        optimizer.apply([a, None], variables)

    for seed in (0, 10):
        a_1, b_1 = gradients_for(variables, seed)
        a_2, _ = gradients_for(variables, seed + 1)
        both(tf.constant(a_1), tf.constant(b_1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            only_first(tf.constant(a_2))
        if how == "eager" or seed == 0:  # Once compiled, Keras is silent too.
            assert any("Gradients do not exist" in str(w) for w in caught)
        plain.apply([(a_1 + a_2) / 2, b_1 / 2], reference)
        helpers.assert_close(
            helpers.values(variables), helpers.values(reference)
        )


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_variable_without_gradient_in_a_cycle_stays_untouched(how):
    """As for plain Keras, momentum does not move it and nothing decays."""
    variables, reference = (
        make_variables((2,), (3,)),
        make_variables((2,), (3,)),
    )
    make = lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer, plain = AccumOptimizer(make(), 2), make()
    plain.build(reference)
    optimizer.build(variables)
    kwargs = {"jit_compile": True} if how == "xla" else {}
    wrap = (lambda f: f) if how == "eager" else tf.function(**kwargs)

    @wrap
    def both(a, b):
        optimizer.apply([a, b], variables)

    @wrap
    def only_first(a):
        optimizer.apply([a, None], variables)

    a, b = (tf.constant(g) for g in gradients_for(variables, 0))
    both(a, b)
    both(a, b)
    plain.apply([a, b], reference)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        only_first(a)
        only_first(a)
        plain.apply([a, None], reference)
    helpers.assert_close(helpers.values(variables), helpers.values(reference))
    both(a, b)
    both(a, b)
    plain.apply([a, b], reference)
    helpers.assert_close(helpers.values(variables), helpers.values(reference))


def test_flush_leaves_variables_without_gradient_alone():
    variables = make_variables((2,), (3,))
    optimizer = AccumOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.1), 3)
    before = variables[1].numpy()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([np.ones(2), None], variables)
    optimizer.flush()
    helpers.assert_equal([variables[1].numpy()], [before])
    assert int(optimizer.iterations) == 1


def test_no_gradient_at_all_raises_and_changes_nothing():
    variables = make_variables((2,))
    optimizer = AccumOptimizer("sgd", 2)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None], variables)
    assert optimizer.num_micro_batches == 0


def test_two_variable_lists_keep_separate_cycles():
    first, second = make_variables((2,)), make_variables((3,))
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.build(first + second)
    start = helpers.values(first + second)
    optimizer.apply([np.full(2, 1.0)], first)
    optimizer.apply([np.full(3, 10.0)], second)
    helpers.assert_equal(helpers.values(first + second), start)
    optimizer.apply([np.full(2, 3.0)], first)
    helpers.assert_close(helpers.values(first), [start[0] - 2.0])
    helpers.assert_equal(helpers.values(second), start[1:])
    optimizer.apply([np.full(3, 30.0)], second)
    helpers.assert_close(helpers.values(second), [start[1] - 20.0])
    # The lists share out the buffers of `build`; only scalars were added.
    assert len(sums_of(optimizer)) == 2


def test_overlapping_variable_lists_keep_separate_cycles():
    a, b, c = make_variables((2,), (2,), (2,))
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.build([a, b, c])
    start = b.numpy()
    optimizer.apply([np.zeros(2), np.full(2, 1.0)], [a, b])
    optimizer.apply([np.full(2, 10.0), np.zeros(2)], [b, c])
    optimizer.apply([np.zeros(2), np.full(2, 3.0)], [a, b])
    np.testing.assert_allclose(b.numpy(), start - 2.0)
    optimizer.apply([np.full(2, 30.0), np.zeros(2)], [b, c])
    np.testing.assert_allclose(b.numpy(), start - 2.0 - 20.0)


def test_flush_divides_by_what_was_collected():
    """https://github.com/Lightning-AI/pytorch-lightning/issues/19987"""
    variable, reference = make_variables((2,))[0], make_variables((2,))[0]
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 4)
    gradient = np.array([1.0, -2.0])
    optimizer.apply([gradient], [variable], weight=3)
    optimizer.flush()
    keras.optimizers.SGD(1.0).apply([gradient], [reference])
    helpers.assert_close([variable.numpy()], [reference.numpy()])
    assert optimizer.cycle_position == 0
    before = variable.numpy()
    optimizer.flush()
    helpers.assert_equal([variable.numpy()], [before])
    assert int(optimizer.iterations) == 1


def test_flush_inside_a_graph():
    variable = make_variables((2,))[0]
    before = variable.numpy()
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 4)

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [variable])
        optimizer.flush()
        optimizer.flush()

    step(tf.constant([1.0, 1.0], "float64"))
    np.testing.assert_allclose(variable.numpy(), before - 1.0)
    assert int(optimizer.iterations) == 1


def test_reset_discards_what_was_collected():
    variable = make_variables((2,))[0]
    before = variable.numpy()
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.apply([np.full(2, 100.0)], [variable])
    optimizer.reset()
    optimizer.apply([np.full(2, 1.0)], [variable])
    optimizer.apply([np.full(2, 3.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), before - 2.0)


def test_flush_and_reset_before_build_do_nothing():
    optimizer = AccumOptimizer("sgd", 2)
    optimizer.flush()
    optimizer.reset()
    assert optimizer.cycle_position == 0
    assert optimizer.num_micro_batches == 0


def test_new_accum_steps_hold_from_the_next_cycle():
    """https://github.com/Lightning-AI/pytorch-lightning/issues/149"""
    variable = make_variables((2,))[0]
    optimizer = AccumOptimizer("sgd", 3)
    step = in_graph(optimizer, [variable])
    made = []
    for index in range(7):
        step([np.ones(2)])
        made.append(int(optimizer.iterations))
        if index == 0:
            optimizer.accum_steps = 2
            assert optimizer.accum_steps == 2
    assert made == [0, 0, 1, 1, 2, 2, 3]


def test_accum_steps_from_one_to_more_needs_a_new_graph():
    variable = make_variables((2,))[0]
    optimizer = AccumOptimizer("sgd", 1)
    step = in_graph(optimizer, [variable])
    step([np.ones(2)])
    with pytest.raises(RuntimeError, match="cannot go from 1 to more"):
        optimizer.accum_steps = 2
    assert optimizer.accum_steps == 1
    assert not optimizer.is_accumulating


def test_accum_steps_from_one_to_more_in_eager_counts_on():
    variable = make_variables((2,))[0]
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 1)
    optimizer.apply([np.ones(2)], [variable])
    optimizer.accum_steps = 2
    before = variable.numpy()
    optimizer.apply([np.full(2, 1.0)], [variable])
    helpers.assert_equal([variable.numpy()], [before])
    optimizer.apply([np.full(2, 3.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), before - 2.0)
    assert optimizer.num_micro_batches == 3
    assert int(optimizer.iterations) == 2


def test_zero_weight_micro_batch_adds_nothing_and_zero_cycle_updates_nothing():
    variable = make_variables((2,))[0]
    before = variable.numpy()
    optimizer = AccumOptimizer(keras.optimizers.Adam(1.0), 2)
    for _ in range(2):
        optimizer.apply([np.full(2, 5.0)], [variable], weight=0)
    helpers.assert_equal([variable.numpy()], [before])
    assert int(optimizer.iterations) == 0
    assert optimizer.cycle_position == 0
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.apply([np.full(2, 5.0)], [variable], weight=0)
    optimizer.apply([np.full(2, 1.0)], [variable], weight=7)
    np.testing.assert_allclose(variable.numpy(), before - 1.0)


def test_learning_rate_is_the_inner_optimizers():
    optimizer = AccumOptimizer(keras.optimizers.SGD(0.5), 2)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25


@pytest.mark.parametrize("nesting", ["outside", "inside", "bare"])
def test_counters_through_loss_scale_optimizer(nesting):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/831"""
    variable = make_variables((2,))[0]
    inner = keras.optimizers.SGD(0.5)
    if nesting == "outside":
        outer = accum = AccumOptimizer(
            keras.optimizers.LossScaleOptimizer(inner), 4
        )
    elif nesting == "inside":
        accum = AccumOptimizer(inner, 4)
        outer = keras.optimizers.LossScaleOptimizer(accum)
    else:
        outer = accum = AccumOptimizer(inner, 4)
    outer.build([variable])

    @tf.function
    def step():
        scaled = outer.scale_loss(tf.constant(1.0, "float64"))
        outer.apply([tf.fill((2,), scaled)], [variable])

    before = variable.numpy()
    for _ in range(10):
        step()
    assert int(accum.iterations) == int(inner.iterations) == 2
    assert accum.num_micro_batches == 10
    np.testing.assert_allclose(variable.numpy(), before - 2 * 0.5)
    outer.learning_rate = 0.125
    assert float(inner.learning_rate) == 0.125


def test_sparse_gradient_equals_dense_twin():
    ids = [[0, 2, 2], [2, 1, 1, 4]]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(len(i), 3)) for i in ids]
    dense = [np.zeros((5, 3)) for _ in ids]
    for table, index, value in zip(dense, ids, values, strict=True):
        np.add.at(table, index, value)
    for name in ("sgd", "adam"):
        sparse_variable, dense_variable = (
            make_variables((5, 3))[0] for _ in "ab"
        )
        sparse, plain = AccumOptimizer(name, 2), AccumOptimizer(name, 2)
        for index, value, table in zip(ids, values, dense, strict=True):
            slices = tf.IndexedSlices(value, index, (5, 3))
            sparse.apply([slices], [sparse_variable])
            plain.apply([table], [dense_variable])
        helpers.assert_close(
            [sparse_variable.numpy()], [dense_variable.numpy()]
        )


def test_config_round_trip():
    optimizer = AccumOptimizer(
        keras.optimizers.AdamW(0.125, weight_decay=0.5), 4, name="mine"
    )
    config = keras.saving.serialize_keras_object(optimizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert type(copy) is AccumOptimizer
    assert copy.get_config() == optimizer.get_config()
    assert copy.accum_steps == 4
    assert copy.name == "mine"
    assert type(copy.inner_optimizer) is keras.optimizers.AdamW
    assert float(copy.learning_rate) == 0.125


def test_inner_optimizer_by_name_config_and_instance():
    instance = keras.optimizers.SGD(0.5)
    config = keras.saving.serialize_keras_object(instance)
    assert type(AccumOptimizer("adam").inner_optimizer).__name__ == "Adam"
    assert float(AccumOptimizer(config).learning_rate) == 0.5
    assert AccumOptimizer(instance).inner_optimizer is instance


def test_finalize_variable_values_is_the_inner_optimizers():
    variable = make_variables((2,))[0]
    inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer = AccumOptimizer(inner, 2)
    for gradient in (1.0, 3.0, 1.0, 3.0):
        optimizer.apply([np.full(2, gradient)], [variable])
    start = make_variables((2,))[0].numpy()
    optimizer.finalize_variable_values([variable])
    # Updates of -2 each; the average starts at the first updated value.
    np.testing.assert_allclose(variable.numpy(), start - 3.0)


def test_apply_gradients_returns_updates():
    variable = make_variables((2,))[0]
    optimizer = AccumOptimizer("sgd", 2)
    assert int(optimizer.apply_gradients([(np.ones(2), variable)])) == 0
    assert int(optimizer.apply_gradients([(np.ones(2), variable)])) == 1
