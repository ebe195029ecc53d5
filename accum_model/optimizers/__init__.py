"""Optimizers, one file each: a pure update rule and a thin class."""

from accum_model.optimizers.adam_accumulate import AdamAccumulate
from accum_model.optimizers.lookahead import Lookahead
from accum_model.optimizers.lookahead_swap import LookaheadSwap
from accum_model.optimizers.radam import RAdam
from accum_model.optimizers.ranger import Ranger

__all__ = [
    "AdamAccumulate",
    "Lookahead",
    "LookaheadSwap",
    "RAdam",
    "Ranger",
]
