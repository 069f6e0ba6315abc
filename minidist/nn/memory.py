"""What to say where there is no memory for a layer: how much it was, and how large a batch fits."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from minidist import context
from minidist.device.room import asked
from minidist.errors import OutOfMemoryError
from minidist.tensor import Tensor

if TYPE_CHECKING:
    from minidist.nn.layer import Layer


def told(error: MemoryError, model: Layer, x: Tensor, training: bool) -> OutOfMemoryError:
    """Return the error of a model, or of a layer of it, that was called with x and had no memory.

    In training the results of all layers stay until the way back, which needs room for two of
    them more; else two are enough. That is what the batch that fits is reckoned from.
    """
    layer, name, nbytes = model, model.name, asked(error)
    if isinstance(error, OutOfMemoryError):  # of a layer within
        layer, name, nbytes = error.layer, f"{model.name}/{error.name}", error.nbytes
    layers = model.leaves()
    sizes = [prod(each.output_shape or ()) * x.dtype.itemsize for each in layers]
    done = layers.index(layer) if layer in layers else 0

    examples = x.shape[0]
    each = 2 * max(sizes, default=1) + (sum(sizes) if training else 0)
    held = examples * sum(sizes[:done]) if training else 0
    devices = context.frame().strategy.devices
    sharing = sum(device is x.device or device.kind == "cpu" == x.device.kind for device in devices)
    free = x.device.room() // max(sharing, 1)
    fit = min((free + held) // max(each, 1), max(examples - 1, 0))

    amount = "" if nbytes is None else f" for {nbytes:,} bytes"
    cure = (
        f"a batch of about {fit:,} on each replica would fit"
        if fit
        else "not even one example fits, so make the examples or the model smaller"
    )
    return OutOfMemoryError(
        f"layer {name!r} finds no memory{amount} on {x.device.short}, in a batch of {examples:,} "
        f"examples: {cure}",
        layer,
        name,
        nbytes,
    )
