"""`loss_scope="micro_batch"`: a batch's loss as the sum over its micro-batches.

With data terms :math:`n_j / d_j` of loss :math:`j`, over rows, valid elements
or sample weights, the gradient of the batch is

.. math:: \\sum_j \\frac{\\sum_i \\nabla n_{ij}}{\\sum_i d_{ij}}

summed over micro-batches :math:`i`; what is no sum over rows is weighted by
them. Each is run forward and backward before the next begins.
"""

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import micro_batch
from accum_model.cut import cut_checks
from accum_model.cut import evaluation
from accum_model.cut import gradient_sum
from accum_model.cut.denominators import Denominators
from accum_model.cut.evaluation import Evaluation
from accum_model.cut.evaluation import Task


def evaluate(task: Task) -> Evaluation:
    """Returns loss and gradient of the batch.

    Raises:
        plan.Restart: If the plan was not complete.
    """
    model, optimizer, plan = task.model, task.optimizer, task.plan
    variables = model.trainable_variables
    loss_metrics = task.loss_metrics()
    denominators = Denominators(task)
    skips = optimizer.nonfinite == "skip_micro_batch"
    collected = gradient_sum.Collector(
        variables,
        optimizer.accum_dtype,
        skips_nonfinite=skips,
        use_xla=task.chunks.use_xla,
        # The gradient at a second point is another one.
        measures_noise=optimizer.estimates_noise and task.is_measured,
    )

    def body(index, data, num_rows, carry):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        batch = micro_batch.MicroBatch(num_rows)
        with tf.GradientTape() as tape, task.scope(carry["state"]) as scope:
            y_pred = _keras_compat.call_for_training(model, x)
            with (
                batch.watch(model, denominators.factor(num_rows)),
                evaluation.caught_losses(loss_metrics) as caught,
            ):
                loss = _keras_compat.compute_loss(
                    model, x, y, y_pred, sample_weight
                )
            cut_checks.losses_of_rows(y_pred, batch.terms, num_rows)
            denominators.check(batch.terms)
            share = denominators.share(num_rows, batch.weight)
            loss = batch.share(loss, share)
            with optimizer.micro_batch(batch):
                scaled = optimizer.scale_loss(loss)
        kept = []
        if task.keeps_outputs:
            kept = task.keep(y_pred, num_rows)
        elif task.is_measured:
            if _keras_compat.compiled_metrics(model):
                plan.note_metrics(y_pred)
            with scope:
                model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        plan.note_assigned(scope)
        gradients = tape.gradient(scaled, variables)
        task.batch.take_part(batch)
        after = collected.add(
            carry["collected"], gradients, batch.weight, num_rows, batch.is_sum
        )
        state = scope.values_of(plan.state)
        if skips:
            is_left_out = (
                after["num_left_out"] > carry["collected"]["num_left_out"]
            )
            state = optimizer.moments.unless(
                is_left_out, plan.state, carry["state"], state
            )
        output_losses = [
            total + _shown(caught[j] * tf.cast(share, caught[j].dtype), share)
            if j in caught
            else total
            for j, total in enumerate(carry["output_losses"])
        ]
        return {
            "loss": carry["loss"] + _shown(loss, share),
            "output_losses": output_losses,
            "collected": after,
            "state": state,
        }, kept

    zero = tf.zeros((), "float64")
    carry = {
        "loss": zero,
        "output_losses": [zero] * len(loss_metrics),
        "collected": collected.zeros(),
        "state": task.first_state(),
    }
    kept = ()
    if task.keeps_outputs and plan.layout is not None:
        kept = plan.layout.specs
    carry, tensors = task.loop(body, carry, kept)
    sums = collected.finish(carry["collected"], task.batch)
    return Evaluation(
        carry["loss"],
        carry["output_losses"],
        sums,
        carry["state"],
        plan.layout.pack(tensors) if task.keeps_outputs else None,
    )


def _shown(loss, share):
    """The part of a loss in what Keras shows for the batch, float64.

    Of a loss that is not reduced Keras shows the mean of the elements.
    """
    shown = tf.cast(tf.reduce_mean(loss), "float64")
    return shown if loss.shape.rank == 0 else shown * share
