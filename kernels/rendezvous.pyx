"""Where threads wait for each other with the GIL released: Fence, SharedFence and Rendezvous."""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cppbool

from minidist.kernels import team

ctypedef void (*Offer)(int by) noexcept nogil
ctypedef cppbool (*Help)() noexcept nogil

cdef extern from "rendezvous.h" namespace "minidist" nogil:
    cdef cppclass CFence "minidist::Fence":
        uint64_t value()
        void advance(uint64_t by)

        bint wait(
            uint64_t target, int64_t spin_ns, int64_t timeout_ns, const Lending *lending
        )

    struct Lending:
        Offer offer
        Help help

cdef extern from "shared_fence.h" namespace "minidist" nogil:
    cdef cppclass CSharedFence "minidist::SharedFence":
        uint64_t value()
        void advance(uint64_t by)
        bint wait(
            uint64_t target, int64_t spin_ns, int64_t timeout_ns, const Lending *lending
        )

cdef extern from "gil.h":
    ctypedef struct PyThreadState
    PyThreadState *md_let_go() noexcept
    void md_take_back(PyThreadState *state) noexcept
    void md_hold() noexcept

# Where replicas that wait at a meeting lend their threads: to the loops of the one that merges.
cdef Lending to_the_team
to_the_team.offer = <Offer> PyCapsule_GetPointer(team.offer, "minidist.kernels.team.offer")
to_the_team.help = <Help> PyCapsule_GetPointer(team.help, "minidist.kernels.team.help")


# Added to a fence that shall hold nobody back any more.
cdef uint64_t FOR_GOOD = <uint64_t>1 << 62
# A century in seconds: the clock arithmetic in nanoseconds stays inside 64 bits.
cdef double FOREVER = 3.0e9


cdef class Fence:
    """A counter that only rises; threads wait, without the GIL, until it has reached a value.

    `spin` is how long, in seconds, a waiter polls before it sleeps.
    """

    cdef CFence fence
    cdef int64_t spin_ns

    def __init__(self, double spin=0.0):
        self.spin_ns = <int64_t>(spin * 1e9)

    @property
    def value(self):
        return self.fence.value()

    @property
    def lifted(self):
        """Whether `lift` was called."""
        return self.fence.value() >= FOR_GOOD

    def advance(self, uint64_t by=1):
        """Raise the counter and wake whoever waited for the value it now has."""
        md_hold()
        self.fence.advance(by)

    def lift(self):
        """Let every present and future waiter pass."""
        self.fence.advance(FOR_GOOD)

    def wait(self, uint64_t target, double timeout=FOREVER):
        """Wait until the counter is at least `target`; False if `timeout` seconds passed first."""
        if self.fence.value() >= target:
            return True
        cdef int64_t timeout_ns = <int64_t>(min(max(timeout, 0.0), FOREVER) * 1e9)
        cdef PyThreadState *state = md_let_go()
        cdef bint reached = self.fence.wait(target, self.spin_ns, timeout_ns, NULL)
        md_take_back(state)
        return reached


cdef class SharedFence:
    """A fence in memory that several processes share; each has an object of its own for it.

    `memory` is 64 bytes, writable and aligned to as many, that are zero before anybody uses them.
    One process advances it, all may wait. `spin` is as for Fence.
    """

    cdef CSharedFence *fence
    cdef object memory
    cdef int64_t spin_ns

    def __init__(self, unsigned char[::1] memory not None, double spin=0.0):
        if memory.shape[0] != 64 or <size_t> &memory[0] % 64 != 0:
            raise ValueError("a SharedFence is 64 bytes at a multiple of 64")
        self.memory = memory
        self.fence = <CSharedFence *> &memory[0]
        self.spin_ns = <int64_t>(spin * 1e9)

    @property
    def value(self):
        return self.fence.value()

    def advance(self, uint64_t by=1):
        """Raise the counter and wake whoever waited, in any process, for the value it now has."""
        self.fence.advance(by)

    def wait(self, uint64_t target, double timeout=FOREVER):
        """Wait until the counter is at least `target`; False if `timeout` seconds passed first."""
        if self.fence.value() >= target:
            return True
        cdef int64_t timeout_ns = <int64_t>(min(max(timeout, 0.0), FOREVER) * 1e9)
        cdef PyThreadState *state = md_let_go()
        cdef bint reached = self.fence.wait(target, self.spin_ns, timeout_ns, NULL)
        md_take_back(state)
        return reached


cdef class Rendezvous:
    """The meeting point of n replica threads, used again and again.

    Each thread calls `arrive`. The last to arrive is told so: it does what the meeting is for and
    calls `open` with the result, which lets the others out of `wait`. Nobody can overtake: the
    next meeting needs all n again. A thread that will not come to another meeting calls `leave`.
    `stop` ends all present and future waiting.

    The bookkeeping between two releases of the GIL is atomic: these methods run no Python code in
    between. Only `wait` lets go of it, and polls for `spin` seconds before it sleeps; a thread that
    polls works on whatever loop the team shares.
    """

    cdef readonly int n                # threads that meet
    cdef readonly list payloads        # what each brought to the present meeting; None: not yet
    cdef readonly list departed        # which threads have left for good
    cdef readonly int arrived
    cdef readonly int left
    cdef readonly uint64_t meetings    # meetings completed
    cdef readonly bint stopped
    cdef object result
    cdef CFence opened
    cdef int64_t spin_ns

    def __init__(self, int n, double spin=0.0):
        self.n = n
        self.payloads = [None] * n
        self.departed = [False] * n
        self.spin_ns = <int64_t>(spin * 1e9)

    def arrive(self, int who, payload):
        """Come to the meeting with a payload (not None).

        Returns 0 to the thread that completes the meeting, to the others the number to `wait` for.
        """
        self.payloads[who] = payload
        self.arrived += 1
        return 0 if self.arrived == self.n else self.meetings + 1

    def leave(self, int who):
        """Come to no further meeting; True for the last thread to say so.

        To say it twice is to say it once.
        """
        if self.departed[who]:
            return False
        self.departed[who] = True
        self.left += 1
        return self.left == self.n

    @property
    def broken(self):
        """Whether all threads are here or gone, some waiting for others that have left."""
        return self.arrived + self.left == self.n and self.arrived > 0 and self.left > 0

    def open(self, result):
        """End the meeting: everyone leaves with `result`. The last to arrive calls it."""
        cdef int i
        self.result = result
        self.arrived = 0
        for i in range(self.n):
            self.payloads[i] = None
        self.meetings += 1
        md_hold()
        self.opened.advance(1)

    def stop(self):
        """Open for good: every wait returns, and `stopped` says that no meeting took place."""
        self.stopped = True
        self.opened.advance(FOR_GOOD)

    def wait(self, uint64_t meeting):
        """Wait until that meeting is over; return its result."""
        cdef PyThreadState *state
        if self.opened.value() < meeting:
            state = md_let_go()
            self.opened.wait(meeting, self.spin_ns, <int64_t>(FOREVER * 1e9), &to_the_team)
            md_take_back(state)
        return self.result
