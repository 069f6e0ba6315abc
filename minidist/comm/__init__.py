"""Communicators: how buffers on several devices meet."""

from minidist.comm.base import Communicator, Row
from minidist.comm.local import LocalCommunicator

__all__ = ["Communicator", "LocalCommunicator", "Row"]
