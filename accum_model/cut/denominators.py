"""What the losses of a whole batch are divided by, ahead of its gradient.

A first pass over the micro-batches adds up their denominators. TensorFlow
computes only what these depend on: masks and sample weights, as a rule.
"""

import keras
import tensorflow as tf

from accum_model import _keras_compat
from accum_model import loss_terms
from accum_model import micro_batch
from accum_model.cut.evaluation import Task
from accum_model.cut.plan import Plan


class Denominators:
    """Shares of a micro-batch in the losses of its batch.

    Keras divides the losses of a micro-batch by what that holds. Their sum over
    the batch is the batch's loss if each is multiplied by its share: of rows,
    valid elements or sample weights.

    Args:
        task: The step.
    """

    def __init__(self, task: Task) -> None:
        self._plan: Plan = task.plan
        self._chunks = task.chunks
        self._weighs_itself = micro_batch.weighs_itself(task.model)
        has_weight = micro_batch.own_micro_batch_weight(task.model)
        if has_weight is not None and task.plan.num_terms is None:
            task.plan.num_terms = 1
        self._totals = None
        if task.plan.num_terms is not None:
            self._totals = _totals(task)

    def share(self, num_rows, weight) -> tf.Tensor:
        """What the loss of a micro-batch is multiplied by, float64 scalar.

        Args:
            num_rows: Rows of the micro-batch.
            weight: Its own weight, if the model's author has written one.
        """
        if self._weighs_itself and self._totals is not None:
            return tf.math.divide_no_nan(
                tf.cast(weight, "float64"), self._totals[0]
            )
        return self._chunks.share(num_rows)

    def factor(self, num_rows) -> loss_terms.Factor:
        """What single losses are multiplied by, in addition to the share.

        Args:
            num_rows: Rows of the micro-batch.
        """
        share = self._chunks.share(num_rows)

        def factor(index: int, term: loss_terms.Term) -> tf.Tensor | None:
            if term.is_sum:
                return tf.math.divide_no_nan(tf.ones_like(share), share)
            if not term.is_divided_by_others:
                return None
            if self._totals is None:
                return None  # To be begun again, see `check`.
            own = tf.cast(term.denominator(), "float64")
            return tf.math.divide_no_nan(own, self._totals[index] * share)

        return factor

    def check(self, terms) -> None:
        """Begins again if `terms` ask for totals that are not there.

        Raises:
            Restart: If so.
        """
        if self._weighs_itself or self._totals is not None:
            return
        if any(term.is_divided_by_others for term in terms):
            self._plan.note_terms(len(terms))


def _totals(task: Task) -> tf.Tensor:
    """Sums of the denominators over the batch, float64, one per loss."""
    model = task.model
    state = task.first_state()

    def body(index, data, num_rows, totals):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        batch = micro_batch.MicroBatch(num_rows)
        with task.scope(state), batch.watch(model):
            y_pred = _keras_compat.call_for_training(model, x)
            _keras_compat.compute_loss(model, x, y, y_pred, sample_weight)
        if micro_batch.weighs_itself(model):
            own = [batch.weight]
        else:
            own = [
                term.denominator() if term.is_divided_by_others else 0.0
                for term in batch.terms
            ]
        return totals + tf.stack([tf.cast(each, "float64") for each in own]), []

    zeros = tf.zeros((task.plan.num_terms,), "float64")
    totals, _ = task.loop(body, zeros)
    return totals
