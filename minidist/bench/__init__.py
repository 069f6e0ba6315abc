"""`python -m minidist.bench`: train a model under a policy; print speed, loss and accuracy."""
