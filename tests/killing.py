"""What killed_ranks.py, a program, and the test that runs and kills it have in common."""

STEPS = 6  # of the training
