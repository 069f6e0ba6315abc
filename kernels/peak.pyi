def multiply_add(steps: int) -> float:
    """Multiply and add in registers, many numbers in each step.

    Returns how many operations that were: a multiplication is one, an addition another. Keeps one
    core busy, without the GIL.
    """
