"""Instruments: what can be seen of a training, each as a with statement around some of its steps.

with md.Bytes(strategy) as moved, md.Staleness(strategy) as ages:
    for images, labels in feed:
        strategy.run(train_step, images, labels)
print(moved, ages)

md.Profile(strategy) says in the same way how long each operation takes.
"""
