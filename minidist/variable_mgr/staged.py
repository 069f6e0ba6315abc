"""Staged: replicas compute with values that are one step old, copied while that step ran.

A step is an apply, whatever it applies to. With W(t) a variable after t of them, replicas compute
in step t with W(max(t - 2, 0)):

    between two applies    a replica holds the item it computes with, and its StagingArea the next
                           one: all variables as the last apply has left them
    before an apply        the areas' items are taken, for the next step; they are there when their
                           copies are done, and so nothing reads the variables any more
    after it               the variables are put into the areas, copied while the next step runs

A run without an apply reads the same values again. In other words: a step reads what the variables
were before the last apply. But one that was assigned or created since is read as it is, and so are
all after an update that has failed. Integers, and what an optimizer keeps beside variables, are
not staged.

A non-trainable variable is staged too, and what replicas add to it or subtract from it goes
through its *delta area*. d(t) is what they have subtracted between the applies t - 1 and t:

    M(t) = M(t - 1) - d(t - 1),  d(0) = 0

subtracted after the update, before the variables are put. Moving averages follow with
d = (M - mean) * (1 - momentum), where M is what replicas read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from minidist import observe
from minidist.assigning import Change, added, assigned, fitting
from minidist.device import Device, Event
from minidist.dtypes import HostArray, kind
from minidist.patience import DEADLINE
from minidist.staging import StagingArea
from minidist.tape import stop_recording
from minidist.tensor import Tensor, to_device
from minidist.traffic import Traffic
from minidist.variable import Copy, Reader, Variable
from minidist.variable_mgr.held import Kept
from minidist.variable_mgr.read import FetchingReader, Read, fetched_bytes


class ReadStaged(Read):
    """An area for each replica, through which all variables go together."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.areas: list[StagingArea] = []
        self._all: list[weakref.ref[StagedReader]] = []  # of all variables, as they were made
        self._in_areas: list[weakref.ref[StagedReader]] = []  # those whose values lie there
        self._updated: list[StagedReader] = []  # those of the update that is going on
        self._copied: list[Event] = []  # after which nothing reads the variables
        self._filled = False  # whether each area has its one item
        self.held = (_HeldItem(), _HeldDelta("delta", "waiting"), _HeldDelta("pending", "pending"))

    def reader(self, copies: Sequence[Copy]) -> Reader:
        if kind(copies[0].dtype) != "f":
            return FetchingReader(copies, self._devices)
        reader = StagedReader(copies, self._devices, self.await_copies)
        self._all.append(weakref.ref(reader))
        return reader

    def slot(self, copies: Sequence[Copy]) -> Reader:
        return FetchingReader(copies, self._devices)

    def predicted_bytes(
        self, variables: Sequence[Variable], read: Sequence[Variable], runs: int
    ) -> Traffic:
        """All variables to every replica, in an update, be they read or not; integers fetched."""
        staged = [each for each in variables if isinstance(each.reader, StagedReader)]
        traffic = fetched_bytes(staged, self._devices, 1)
        rest = [each for each in read if not isinstance(each.reader, StagedReader)]
        traffic.update(fetched_bytes(rest, self._devices, runs))
        return traffic

    def before_update(self) -> None:
        readers = [reader for ref in self._all if (reader := ref()) is not None]
        self._all = [ref for ref in self._all if ref() is not None]
        for reader in readers:
            reader.begin()
        filled, self._filled = self._filled, False  # as it is if anything fails from here on
        items = [area.get() for area in self.areas] if filled else []
        self.await_copies()  # on some devices a get lets only their streams wait
        if not filled or self._all != self._in_areas:
            items = self._renew(readers, items)
        for replica, item in enumerate(items):
            for reader, tensor in zip(readers, item, strict=True):
                reader.take(replica, tensor)
        self._updated = readers

    def _renew(self, readers: Sequence[StagedReader], items: list[Any]) -> list[Any]:
        """Make areas for these readers; return an item of each: what was in `items`, or W."""
        values = [reader.copy.tensor for reader in readers]
        kinds = [value.dtype for value in values], [value.shape for value in values]
        areas = [StagingArea(*kinds, capacity=1, device=device) for device in self._devices]
        for area in areas:
            area.what = "reads"
            area.put(values)
        renewed = [area.get() for area in areas]
        places = {id(ref): place for place, ref in enumerate(self._in_areas)}
        for device, item, old in zip(self._devices, renewed, items, strict=False):
            for tensor, ref in zip(item, self._all, strict=True):
                if id(ref) in places:
                    device.copy(tensor.array, old[places[id(ref)]].array)
        self.close()
        self.areas, self._in_areas = areas, list(self._all)
        return renewed

    def after_update(self) -> None:
        readers, self._updated = self._updated, []
        for reader in readers:
            reader.delta.pass_on()
        self.put_all(readers)
        for reader in readers:
            reader.settle()
        self._filled = True

    def put_all(self, readers: Sequence[StagedReader]) -> None:
        """Let the areas have all variables as they are after the update."""
        self._put([reader.copy.tensor for reader in readers])

    def _put(self, values: Sequence[Tensor]) -> None:
        self._copied = [area.put(values, unchanged=True) for area in self.areas]

    def await_copies(self) -> None:
        """Let all copies into the areas read the variables before anything changes them."""
        for event in self._copied:
            if not event.done():
                event.precede(DEADLINE)

    def close(self) -> None:
        for area in self.areas:
            area.close()
        self.areas, self._in_areas, self._filled = [], [], False


class StagedReader(FetchingReader):
    """What the replica's area held before the last apply; the variable if assigned since."""

    def __init__(
        self,
        copies: Sequence[Copy],
        devices: Sequence[Device],
        await_copies: Callable[[], None],
    ) -> None:
        super().__init__(copies, devices)
        self._await_copies = await_copies
        self.delta = _Delta(self.copy)
        self._now: list[Tensor] = [self.copy.tensor] * len(devices)
        self._now_after = -1  # the version of the variable as of which that is what is read
        self._put = -1  # the version that lies in the areas
        self._version = -1  # that of what is read now, where it is older

    def read(self, replica: int, step: int) -> Tensor:
        if self._now_after != self.copy.version:
            return super().read(replica, step)
        return self._now[replica]

    def version(self, replica: int) -> int:
        return self._version if self.is_older() else super().version(replica)

    def newest(self, replica: int, step: int) -> Tensor:
        return super().read(replica, step)

    def before_write(self) -> None:
        self._await_copies()

    # --- around an update

    def begin(self) -> None:
        """Let replicas read the variable as it is, should this update fail."""
        self._now_after = -1
        self.delta.check()

    def take(self, replica: int, tensor: Tensor) -> None:
        """Let a replica compute with an item's tensor, which becomes W if that was assigned."""
        if self._put != self.copy.version:
            tensor.device.copy(tensor.array, self.copy.array)
            if observe.counting:
                home, nbytes = self.copy.device.short, self.copy.array.nbytes
                observe.moved(home, tensor.device.short, nbytes, "reads")
        self._now[replica] = tensor
        self._version = self.copy.version

    def settle(self) -> None:
        """Let replicas read what they have taken: the areas hold the variable as it is."""
        self._now_after = self._put = self.copy.version

    # --- what replicas assign

    def change(self, copies: Sequence[Copy], change: Change, value: Any) -> None:
        if change is assigned or self._trainable():
            super().change(copies, change, value)
            return
        with stop_recording():
            value = fitting(self.copy, value)
            self.delta.add(-value if change is added else value)

    def follow(self, copies: Sequence[Copy], mean: Tensor, momentum: float) -> None:
        if self._trainable():
            super().follow(copies, mean, momentum)
        else:
            read = to_device(self.now(), self.copy.device)
            self.delta.add((read - mean) * (1 - momentum))

    def _trainable(self) -> bool:
        variable = self.copy.container
        return variable is None or variable.trainable

    # --- saving

    def now(self) -> Tensor:
        """Return what replica 0 computes with; the others with the same."""
        return self._now[0] if self.is_older() else self.copy.tensor

    def is_older(self) -> bool:
        """Whether replicas compute with another value than the variable's own."""
        return self._now_after == self.copy.version

    def restore(self, array: HostArray) -> None:
        """Let replicas compute with this until the next apply, and with the variable then."""
        self._now = [Tensor(device.copy_in(array), device) for device in self.devices]
        self._now_after = self.copy.version
        self._version = self._now_after - 1


class _Delta:
    """A variable's delta area: what assignments subtract, on its way.

    pending    since the last apply
    waiting    between the two before
    """

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self.pending: Tensor | None = None
        self.waiting: Tensor | None = None
        self._of = copy.version  # who assigns the variable takes back what is on its way

    def add(self, delta: Tensor) -> None:
        self.check()
        self.pending = delta if self.pending is None else self.pending + delta

    def check(self) -> None:
        """Forget what is on its way to a value that was assigned since."""
        if self._of != self._copy.version:
            self.pending = self.waiting = None
            self._of = self._copy.version

    def pass_on(self) -> None:
        """Subtract what waits; what is pending waits from now on."""
        if self.waiting is not None:
            self._copy.write(self._copy.tensor - self.waiting)
        self.waiting, self.pending = self.pending, None
        self._of = self._copy.version


# --- saving -------------------------------------------------------------------------------------


class _HeldItem:
    """What replicas compute with next."""

    suffix = "staged"

    def take_out(self, variable: Variable) -> Kept | None:
        reader = variable.reader
        if not isinstance(reader, StagedReader) or not reader.is_older():
            return None
        tensor = reader.now()
        return Kept(tensor.device.copy_out(tensor.array))

    def put_back(self, variable: Variable, kept: Kept | None) -> None:
        reader = variable.reader
        if kept is not None and kept.array is not None and isinstance(reader, StagedReader):
            reader.restore(kept.array)


class _HeldDelta:
    """What is on its way through a delta area: its `waiting` or its `pending`."""

    def __init__(self, suffix: str, which: str) -> None:
        self.suffix = suffix
        self._which = which

    def take_out(self, variable: Variable) -> Kept | None:
        if not isinstance(variable.reader, StagedReader):
            return None
        delta = variable.reader.delta
        delta.check()
        tensor: Tensor | None = getattr(delta, self._which)
        return None if tensor is None else Kept(tensor.device.copy_out(tensor.array))

    def put_back(self, variable: Variable, kept: Kept | None) -> None:
        if kept is not None and isinstance(variable.reader, StagedReader):
            delta, device = variable.reader.delta, variable.copies[0].device
            delta.check()
            setattr(delta, self._which, Tensor(device.copy_in(kept.array), device))
