"""Optimizers: what all have in common is in optimizer.py; each rule is a class in rules.py.

loss_scale.py and accumulation.py: what may happen to gradients on the way.
schedules.py: learning rates that change.
"""

from minidist.optim import schedules
from minidist.optim.loss_scale import LossScale
from minidist.optim.optimizer import Optimizer
from minidist.optim.rules import SGD, Adam, Momentum, RMSProp

__all__ = ["SGD", "Adam", "LossScale", "Momentum", "Optimizer", "RMSProp", "schedules"]
