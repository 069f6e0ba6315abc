"""The arithmetic, written once: headers that compile for host and CUDA, and their host loops."""
