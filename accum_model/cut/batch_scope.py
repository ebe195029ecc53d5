"""`loss_scope="batch"`: one loss over all rows, whatever it does with them.

With outputs :math:`Y` of the whole batch and loss :math:`L(Y, w)` the gradient

.. math:: \\frac{\\partial L}{\\partial Y} \\frac{\\partial Y}{\\partial w}
          + \\frac{\\partial L}{\\partial w}

is taken in three steps: outputs of all micro-batches, without what backward
passes need; the loss and :math:`\\partial L / \\partial Y`; each micro-batch
once more, now with its backward pass. The second pass begins from the states
the first one began from, so it sees the same noise.

Source: Gao et al., `Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup <https://arxiv.org/abs/2101.06983>`_ (GradCache), section 3.2.
"""

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import micro_batch
from accum_model.cut import cut_checks
from accum_model.cut import evaluation
from accum_model.cut import gradient_sum
from accum_model.cut.evaluation import Evaluation
from accum_model.cut.evaluation import Task


def evaluate(task: Task) -> Evaluation:
    """Returns loss and gradient of the batch.

    Raises:
        plan.Restart: If the plan was not complete.
    """
    model, plan = task.model, task.plan
    variables = model.trainable_variables
    tensors, first_states, added, state = _first_pass(task)
    y_pred = plan.layout.pack(tensors)
    outputs = tensors[: plan.layout.num_outputs]
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(task.chunks.data)
    loss_metrics = task.loss_metrics()
    with tf.GradientTape() as tape, task.scope(state) as scope:
        tape.watch([*(o for o in outputs if o.dtype.is_floating), *added])
        # Those of the first pass: here they are one sum over the batch.
        _keras_compat.clear_losses(model)
        for each in added:
            # A functional model refuses its own `add_loss`.
            keras.layers.Layer.add_loss(model, each)
        with (
            task.batch.watch(model),
            evaluation.caught_losses(loss_metrics) as caught,
        ):
            loss = _keras_compat.compute_loss(
                model, x, y, y_pred, sample_weight
            )
        scaled = task.optimizer.scale_loss(loss)
    plan.note_assigned(scope)
    state = scope.values_of(plan.state)
    gradients = tape.gradient(scaled, [*outputs, *added, *variables])
    num_outputs = len(outputs)
    d_outputs = list(map(_dense, gradients[:num_outputs]))
    d_added = [
        gradient
        for gradient in gradients[num_outputs : num_outputs + len(added)]
        if gradient is not None
    ]
    direct = gradients[num_outputs + len(added) :]
    zero = tf.zeros((), "float64")
    return Evaluation(
        tf.cast(tf.reduce_mean(loss), "float64"),
        [
            tf.cast(tf.reduce_mean(caught.get(position, zero)), "float64")
            for position in range(len(loss_metrics))
        ],
        _second_pass(task, first_states, d_outputs, d_added, direct),
        state,
        y_pred,
    )


def _first_pass(task):
    """Outputs of the batch, and the states that each micro-batch began from.

    Returns:
        Outputs and masks as in the plan's layout; for each variable of the
        state its values, one for each micro-batch; the mean over rows of what
        layers have added to the loss, a list of at most one scalar; the state
        after the last micro-batch.
    """
    model, plan = task.model, task.plan

    def body(index, data, num_rows, carry):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        state, added = carry
        with task.scope(state) as scope, cut_checks.repeatable(model):
            y_pred = _keras_compat.call_for_training(model, x)
            terms = micro_batch.added_losses(model)
            kept = task.keep(y_pred, num_rows)
            plan.note_added(terms)
            plan.note_assigned(scope)
            share = task.chunks.share(num_rows)
            added = [
                total + _sum(terms, total.dtype) * tf.cast(share, total.dtype)
                for total in added
            ]
            kept += [tf.expand_dims(value, 0) for value in state]
            return (scope.values_of(plan.state), added), kept

    specs = list(plan.layout.specs) if plan.layout is not None else []
    num_tensors = len(specs)
    for variable in plan.state:
        specs.append(
            tf.TensorSpec([None, *variable.shape], tf.as_dtype(variable.dtype))
        )
    added = [] if plan.added_dtype is None else [tf.zeros((), plan.added_dtype)]
    carry = (task.first_state(), added)
    (state, added), kept = task.loop(body, carry, specs)
    return kept[:num_tensors], kept[num_tensors:], added, state


def _second_pass(task, first_states, d_outputs, d_added, direct):
    """Gradients of the variables, by way of the outputs and directly.

    Args:
        task: The step.
        first_states: As `_first_pass` returns them.
        d_outputs: Gradient of the loss with respect to each output, or None.
        d_added: The same for what layers have added, at most one scalar.
        direct: The same for each variable, the outputs held fixed.
    """
    model = task.model
    variables = model.trainable_variables
    collector = gradient_sum.Collector(
        variables, task.optimizer.accum_dtype, use_xla=task.chunks.use_xla
    )
    x, _, _ = keras.utils.unpack_x_y_sample_weight(task.chunks.data)

    def body(index, data, num_rows, collected):
        x, d_outputs = data
        state = [values[index] for values in first_states]
        with tf.GradientTape() as tape, task.scope(state):
            y_pred = _keras_compat.call_for_training(model, x)
            terms = micro_batch.added_losses(model)
        pulled = [
            (output, gradient)
            for output, gradient in zip(
                keras.tree.flatten(y_pred), d_outputs, strict=True
            )
            if gradient is not None
        ]
        share = task.chunks.share(num_rows)
        for gradient in d_added:
            pulled += [(term, _spread(gradient, share, term)) for term in terms]
        targets, output_gradients = zip(*pulled, strict=True)
        gradients = tape.gradient(
            targets, variables, output_gradients=output_gradients
        )
        return collector.add(collected, gradients), []

    collected = collector.add(collector.zeros(), direct)
    if d_added or any(gradient is not None for gradient in d_outputs):
        collected, _ = task.of_data((x, d_outputs)).loop(body, collected)
    return collector.gradients(collected)


def _sum(terms, dtype):
    return tf.add_n([tf.reduce_sum(tf.cast(term, dtype)) for term in terms])


def _spread(gradient, share, term):
    """The gradient of a share of the sum over the elements of `term`."""
    value = tf.cast(gradient, "float64") * share
    return tf.fill(tf.shape(term), tf.cast(value, term.dtype))


def _dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient)
