"""What to say where there is no memory for a layer: how much it was, and how large a batch fits."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from minidist import context
from minidist.device.room import asked
from minidist.dtypes import kind
from minidist.errors import OutOfMemoryError
from minidist.tensor import Tensor

if TYPE_CHECKING:
    from minidist.nn.layer import Layer


def out_of_memory(error: MemoryError, model: Layer, x: Tensor, training: bool) -> OutOfMemoryError:
    """Return the error of a model, or of a layer of it, that was called with x and had no memory.

    In training the results of all layers stay until the way back, which needs room for two of
    them more; else two are enough. That, with the examples themselves, is what the batch that fits
    is reckoned from. What this replica holds of it would be smaller with a smaller batch, and so
    would what others in the same memory hold, each as much as this one.
    """
    layer, name, nbytes = model, model.name, asked(error)
    if isinstance(error, OutOfMemoryError):  # of a layer within
        layer, name, nbytes = error.layer, f"{model.name}/{error.name}", error.nbytes
    layers = model.leaves()
    example = prod(x.shape[1:]) * x.dtype.itemsize
    width = x.dtype.itemsize if kind(x.dtype) == "f" else 4  # what layers make of integers
    sizes = [prod(each.output_shape or ()) * width for each in layers]
    last = layer.leaves()[-1]  # what a layer of layers does itself comes after them
    done = layers.index(last) if last in layers else 0

    examples = x.shape[0]
    each = example + 2 * max(sizes) + (sum(sizes) if training else 0)
    held = examples * (example + (sum(sizes[:done]) if training else 0))
    devices = context.frame().strategy.devices
    sharing = sum(device is x.device or device.kind == "cpu" == x.device.kind for device in devices)
    share = x.device.room() // max(sharing, 1)
    fit = min((share + held) // max(each, 1), max(examples - 1, 0))

    amount = "" if nbytes is None else f" for {nbytes:,} bytes"
    if fit:
        cure = f"a batch of about {fit:,} on each replica would fit"
    elif examples > 1:  # what is held, and by whom, is reckoned, so even now one might fit
        cure = "try a smaller batch"
    else:
        cure = "not even one example fits, so make the examples or the model smaller"
    return OutOfMemoryError(
        f"layer {name!r} finds no memory{amount} on {x.device.short}, in a batch of {examples:,} "
        f"examples: {cure}",
        layer,
        name,
        nbytes,
    )
