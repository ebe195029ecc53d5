"""Gradient accumulation for Keras 3 on TensorFlow.

The update is that of the large batch, whatever the sizes of the micro-batches.
"""

from accum_model import _backend

_backend.require_tensorflow()

from accum_model._version import __version__
from accum_model.batch_size import accum_steps_for
from accum_model.batch_size import effective_batch_size
from accum_model.batch_size import updates_per_epoch
from accum_model.callback import AccumCallback
from accum_model.gradient_clipping import AdaptiveGradientClipping
from accum_model.layers.accum_batch_normalization import AccumBatchNormalization
from accum_model.model import AccumModel
from accum_model.optimizer import AccumOptimizer
from accum_model.optimizers.adam_accumulate import AdamAccumulate
from accum_model.optimizers.heun import Heun
from accum_model.optimizers.lookahead import Lookahead
from accum_model.optimizers.lookahead_swap import LookaheadSwap
from accum_model.optimizers.radam import RAdam
from accum_model.optimizers.ranger import Ranger
from accum_model.optimizers.sam import SAM

__all__ = [
    "AccumBatchNormalization",
    "AccumCallback",
    "AccumModel",
    "AccumOptimizer",
    "AdamAccumulate",
    "AdaptiveGradientClipping",
    "Heun",
    "Lookahead",
    "LookaheadSwap",
    "RAdam",
    "Ranger",
    "SAM",
    "__version__",
    "accum_steps_for",
    "effective_batch_size",
    "updates_per_epoch",
]
