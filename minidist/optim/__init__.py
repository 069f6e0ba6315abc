"""Optimizers: what all have in common is in optimizer.py; each rule is a class in rules.py."""

from minidist.optim.optimizer import Optimizer
from minidist.optim.rules import SGD, Adam, Momentum, RMSProp

__all__ = ["SGD", "Adam", "Momentum", "Optimizer", "RMSProp"]
