"""Communicators: how buffers on several devices meet."""

from minidist.comm.base import Communicator
from minidist.comm.local import LocalCommunicator

__all__ = ["Communicator", "LocalCommunicator"]
