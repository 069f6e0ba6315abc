"""Programs that a GPU's streams do right, and mistakes that take away what keeps their order."""

from __future__ import annotations

import numpy as np

import minidist as md
from minidist.device import get

N = 1000


def add_on_another_stream() -> bool:
    """Let another stream add up what this one makes, and look at the sum here."""
    device = get("cuda:0")
    other = device.stream("communication")
    total = device.ops.full((N,), 0.0, "float32")
    for i in range(8):
        array = device.ops.full((N,), i, "float32")
        other.submit(lambda a=array: device.ops.accumulate(total, a))
        del array
    return bool((device.copy_out(total) == sum(range(8))).all())


def write_what_is_read() -> bool:
    """Let this stream write again and again what another one reads."""
    device = get("cuda:0")
    other = device.stream("copy")
    array, copies = device.ops.full((N,), 0.0, "float32"), []
    for i in range(8):
        device.ops.fill(array, i)
        other.submit(lambda: copies.append(device.ops.copy(array)))
    return all((device.copy_out(copy) == i).all() for i, copy in enumerate(copies))


def copy_in() -> bool:
    device = get("cuda:0")
    values = [np.full(N, i, np.float32) for i in range(8)]
    arrays = [device.copy_in(value) for value in values]
    return all((device.copy_out(a) == v).all() for a, v in zip(arrays, values, strict=True))


def train() -> bool:
    """Meet in a sum over two devices of one GPU."""
    with md.Strategy("cuda:0*2", "replicated") as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(N, np.float32), name="w")
        opt = md.optim.SGD(1.0)

        def step() -> None:
            me = md.get_replica_context().replica_id
            gradient = md.ops.multiply(md.constant(np.full(N, me + 1.0, np.float32)), 2.0)
            opt.apply_gradients([(gradient, w)])

        for _ in range(4):
            strategy.run(step)
        return all((copy.device.copy_out(copy.array) == -12).all() for copy in w.copies)


def forget_the_writer(cupy) -> None:
    from minidist.device.cuda_memory import Block

    Block.read = lambda self, stream: self._readers.update({stream: stream.next})


def forget_the_readers(cupy) -> None:
    from minidist.device.cuda_memory import Block

    def write(self, stream):
        stream.follow(self._writer, self._written)
        self._writer, self._written = stream, stream.next

    Block.write = write


def forget_all_waits(cupy) -> None:
    from minidist.device.cuda_stream import CudaStream

    CudaStream.follow = lambda self, other, position: None


def drop_at_once(cupy) -> None:
    from minidist.device.cuda_memory import Memory

    Memory.drop = lambda self, pointer, home, events: None


def use_pinned_memory_at_once(cupy) -> None:
    from minidist.device.cuda_stream import CudaEvent

    CudaEvent.done = lambda self: True


def do_not_wait_for_what_comes_out(cupy) -> None:
    from minidist.device.cuda_stream import CudaEvent

    CudaEvent.wait = lambda self, timeout=0: None


CASES = [
    (add_on_another_stream, forget_the_writer),
    (write_what_is_read, forget_the_readers),
    (train, forget_all_waits),
    (add_on_another_stream, drop_at_once),
    (copy_in, use_pinned_memory_at_once),
    (copy_in, do_not_wait_for_what_comes_out),
]
