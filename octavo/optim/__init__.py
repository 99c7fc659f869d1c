"""Optimizers whose state takes few bytes."""

from octavo.formats import E4M4
from octavo.optim.adam import Adam, AdamW
from octavo.optim.in_backward import update_in_backward
from octavo.optim.moment import Moment
from octavo.optim.muon import Muon
from octavo.optim.sgd import SGD

__all__ = ["E4M4", "SGD", "Adam", "AdamW", "Moment", "Muon", "update_in_backward"]
