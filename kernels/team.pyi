from typing import Final

parallel: Final[object]
"""Capsule of the C function that shares a loop among the threads of this process."""
offer: Final[object]
"""Capsule of the C function by which a thread says that it polls and may help, or no longer."""
help: Final[object]
"""Capsule of the C function that works on the loop that is open, if there is one."""
