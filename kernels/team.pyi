from typing import Final

parallel: Final[object]
"""Capsule of the C function that shares a loop among the threads of this process."""
