"""Ops: the arithmetic that a kind of device must be able to do, on its own raw arrays.

`ops/`, the tape and everything above compute only through these verbs, so a new kind of device is
one subclass. Who calls has checked shapes and dtypes. All arrays are C-contiguous, those given and
those returned; what is returned is new unless the verb says otherwise. Verbs are coarse where a
device gains by doing things together.

Images are [n, height, width, channels] (NHWC), filters [height, width, in, out] (HWIO). A `Window`
is where a filter or pool lies on an image. Any length may be 0.

Narrow arrays, float16 or bfloat16, may stand wherever float32 may. A verb computes them in float32
at least, sums included, and rounds each of its results once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NotRequired, TypedDict, Unpack

import numpy as np

from minidist.device.base import Array

Shape = tuple[int, ...]
Axis = tuple[int, ...]
Words = tuple[int, ...]  # 32-bit words of a Philox key (2) or counter (3)
Tensors = Sequence[Array]

# The verbs that change what they are given, and what of it: by place and by name, and whether they
# read that too.
WRITES: dict[str, dict[int | str, bool]] = {
    "fill": {0: False, "a": False},
    "convert": {0: False, "destinations": False},
    "accumulate": {0: True, "a": True},
    "scatter": {0: True, "a": True},  # the other rows stay
    "scatter_add": {0: True, "a": True},
    "matmul": {4: False, "out": False},
    "sgd": {0: True, "weights": True, "copies": False},
    "momentum": {0: True, 2: True, "weights": True, "momenta": True, "copies": False},
    "rmsprop": {
        0: True,
        2: True,
        3: True,
        "copies": False,
        "weights": True,
        "squares": True,
        "momenta": True,
    },
    "adam": {
        0: True,
        2: True,
        3: True,
        "copies": False,
        "weights": True,
        "firsts": True,
        "seconds": True,
    },
    "sum": {0: False, "destinations": False},
}


class Window(NamedTuple):
    """Where windows of a filter or pool lie: each pair is (vertical, horizontal)."""

    size: tuple[int, int]
    strides: tuple[int, int]
    before: tuple[int, int]  # rows above and columns left of the image that count as padding
    after: tuple[int, int]
    output: tuple[int, int]  # how many windows

    @property
    def position(self) -> tuple[int, int, int, int, int, int]:
        """Size, strides and padding before, as kernels take them."""
        return (*self.size, *self.strides, *self.before)

    @property
    def is_pointwise(self) -> bool:
        """Whether each is one pixel, one after the other: the image is its own columns."""
        return self.position == (1, 1, 1, 1, 0, 0) and self.after == (0, 0)


class Update(TypedDict):
    """What every update rule takes by name. It uses g' = clipped(g·scale) + weight_decay·w.

    weight_decay: a number for each tensor.
    clip: each element is clipped to [−clip, clip]; NaN stays NaN. By default nothing is.
    copies: more arrays that get the new weights, where the device `can_update_copies`.
    others: gradients of more replicas, where it can do that: g is the sum ((c0·g0 + c1·g1) + …),
        in the order of the replicas, and nowhere stored.
    counts: those c, how many times each replica's gradients are taken, those in `gradients` first;
        None: once.
    """

    lr: float
    scale: float
    weight_decay: Sequence[float]
    clip: NotRequired[float]
    copies: NotRequired[Sequence[Tensors]]
    others: NotRequired[Sequence[Tensors]]
    counts: NotRequired[Sequence[float] | None]
    threads: int


class MomentumUpdate(Update):
    """What `Ops.momentum` takes by name."""

    momentum: float
    nesterov: bool


class RMSPropUpdate(Update):
    """What `Ops.rmsprop` takes by name."""

    decay: float
    momentum: float
    epsilon: float


class AdamUpdate(Update):
    """What `Ops.adam` takes by name."""

    beta1: float
    beta2: float
    epsilon: float
    step: int


class Ops(ABC):
    """What a device computes. See the module's first lines for what holds of all verbs.

    can_update_copies: whether update rules add up the gradients of several replicas and put the new
        weights into several copies, in the same pass: `copies`, `others` and `counts` of an Update.
    """

    can_update_copies: ClassVar[bool] = False

    # -- arrays ------------------------------------------------------------------------------

    @abstractmethod
    def host_view(self, a: Array) -> np.ndarray[Any, Any]:
        """Return the values in the host's memory, read-only; a view where the device allows it."""

    @abstractmethod
    def full(self, shape: Shape, value: float, dtype: Any) -> Array:
        """Return an array of one value."""

    @abstractmethod
    def fill(self, a: Array, value: float) -> None:
        """Set all elements to one value, in place."""

    @abstractmethod
    def copy(self, a: Array) -> Array:
        """Return a copy."""

    @abstractmethod
    def share_memory(self, a: Array, b: Array) -> bool:
        """Return whether two arrays may overlap in memory (never False when they do)."""

    @abstractmethod
    def cast(self, a: Array, dtype: Any) -> Array:
        """Convert elements to another dtype, rounded once; what is too large becomes infinite."""

    @abstractmethod
    def convert(self, destinations: Tensors, sources: Tensors, *, threads: int) -> None:
        """Store what `cast` returns of each source in the destination of its number and shape."""

    @abstractmethod
    def at_once(self, function: Callable[..., Any], *arrays: Array) -> Any:
        """Return function(*arrays), a few verbs in a row, as one verb would.

        Of narrow arrays nothing in between is rounded to their dtype, only the result (an array
        or a tuple of arrays).
        """

    # -- elementwise; shapes broadcast ---------------------------------------------------------

    @abstractmethod
    def add(self, a: Array, b: Array) -> Array: ...
    @abstractmethod
    def subtract(self, a: Array, b: Array) -> Array: ...
    @abstractmethod
    def multiply(self, a: Array, b: Array) -> Array: ...
    @abstractmethod
    def divide(self, a: Array, b: Array) -> Array: ...
    @abstractmethod
    def power(self, a: Array, exponent: float) -> Array: ...
    @abstractmethod
    def negative(self, a: Array) -> Array: ...
    @abstractmethod
    def exp(self, a: Array) -> Array: ...
    @abstractmethod
    def log(self, a: Array) -> Array: ...
    @abstractmethod
    def sqrt(self, a: Array) -> Array: ...

    @abstractmethod
    def compare(self, relation: str, a: Array, b: Array) -> Array:
        """Return bools; `relation` is "equal", "less" or "less_equal"."""

    @abstractmethod
    def accumulate(self, a: Array, b: Array) -> None:
        """Do a += b in place; same shape and dtype."""

    @abstractmethod
    def relu(self, x: Array) -> Array:
        """max(x, 0)."""

    @abstractmethod
    def relu_backward(self, dy: Array, y: Array) -> Array:
        """dy where y > 0, else 0."""

    @abstractmethod
    def relu6(self, x: Array) -> Array:
        """min(max(x, 0), 6)."""

    @abstractmethod
    def relu6_backward(self, dy: Array, y: Array) -> Array:
        """dy where 0 < y < 6, else 0."""

    @abstractmethod
    def gelu(self, x: Array) -> Array:
        """x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2."""

    @abstractmethod
    def gelu_backward(self, dy: Array, x: Array) -> Array:
        """Gradient of gelu's x."""

    @abstractmethod
    def dropout(self, x: Array, rate: float, key: Words, counter: Words) -> Array:
        """x/(1−rate) where the Philox stream of (key, counter) gives at least `rate`, else 0."""

    # -- shapes ----------------------------------------------------------------------------------

    @abstractmethod
    def reshape(self, a: Array, shape: Shape) -> Array:
        """Return the same elements in another shape; may be a view."""

    @abstractmethod
    def transpose(self, a: Array, axes: Axis) -> Array:
        """Return the axes in another order."""

    @abstractmethod
    def broadcast_to(self, a: Array, shape: Shape) -> Array:
        """Return `a` repeated to fill `shape`, really written out."""

    @abstractmethod
    def concatenate(self, arrays: Tensors, axis: int = 0) -> Array:
        """Return arrays of one dtype one after the other along an axis."""

    @abstractmethod
    def take(self, a: Array, index: Any) -> Array:
        """Return a[index], basic indexing (integers, slices, None, ...); may be a view."""

    @abstractmethod
    def put(self, a: Array, index: Any, shape: Shape) -> Array:
        """Return zeros of `shape` with `a` at `index`: what `take` is transposed."""

    # -- rows: what lies along the first axis, by int64 indices [k] in range ---------------------

    @abstractmethod
    def gather(self, a: Array, indices: Array) -> Array:
        """Return rows [k, ...]: a[indices[i]]."""

    @abstractmethod
    def scatter(self, a: Array, indices: Array, rows: Array) -> None:
        """Do a[indices[i]] = rows[i] in place; no index occurs twice. `rows` may broadcast."""

    @abstractmethod
    def scatter_add(self, a: Array, indices: Array, rows: Array) -> None:
        """Do a[indices[i]] += rows[i] in place, in the order of i."""

    @abstractmethod
    def unique(self, indices: Array) -> tuple[Array, Array]:
        """Return the distinct indices, ascending, and for each index its place among them."""

    # -- reductions ------------------------------------------------------------------------------

    @abstractmethod
    def reduce_sum(self, a: Array, axes: Axis, keepdims: bool) -> Array:
        """Sum over `axes`."""

    @abstractmethod
    def reduce_max(self, a: Array, axes: Axis, keepdims: bool) -> Array:
        """Greatest element over `axes`, none of which has length 0."""

    @abstractmethod
    def argmax(self, a: Array, axis: int) -> Array:
        """First index of the greatest element, int64."""

    # -- linear ----------------------------------------------------------------------------------

    @abstractmethod
    def matmul(
        self,
        a: Array,
        b: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: Array | None = None,
    ) -> Array:
        """Matrix product of [n, k] and [k, m], each given transposed if the flag says so.

        It is put into `out`, if there is one, and returned. With equal axes before these two, it is
        that of each pair of matrices.
        """

    @abstractmethod
    def dense(self, x: Array, w: Array, bias: Array, relu: bool = False) -> Array:
        """x @ w + bias, or its ReLU: [n, k], [k, m], [m] -> [n, m]."""

    @abstractmethod
    def conv2d(
        self,
        x: Array,
        w: Array,
        window: Window,
        bias: Array | None = None,
        relu: bool = False,
    ) -> Array:
        """Cross-correlate NHWC images with an HWIO filter, zeros around; add a bias, take ReLU."""

    @abstractmethod
    def bias_backward(self, dy: Array, y: Array | None = None) -> tuple[Array, Array]:
        """Return (dz, dbias), the gradients of z = x + bias and of the bias, along the last axis.

        Given y, the ReLU of z, dz is dy where y > 0, else 0; without, it is dy itself.
        """

    @abstractmethod
    def conv2d_backward_input(self, dy: Array, w: Array, x_shape: Shape, window: Window) -> Array:
        """Gradient of conv2d's x."""

    @abstractmethod
    def conv2d_backward_filter(self, x: Array, dy: Array, w_shape: Shape, window: Window) -> Array:
        """Gradient of conv2d's w."""

    @abstractmethod
    def depthwise_conv2d(self, x: Array, w: Array, window: Window) -> Array:
        """Cross-correlate each channel of NHWC images with its filter [kh, kw, c], zeros around."""

    @abstractmethod
    def depthwise_conv2d_backward_input(
        self, dy: Array, w: Array, x_shape: Shape, window: Window
    ) -> Array:
        """Gradient of depthwise_conv2d's x."""

    @abstractmethod
    def depthwise_conv2d_backward_filter(self, x: Array, dy: Array, window: Window) -> Array:
        """Gradient of depthwise_conv2d's w."""

    # -- pooling and normalisation -----------------------------------------------------------------

    @abstractmethod
    def max_pool(self, x: Array, window: Window) -> tuple[Array, Array]:
        """Return (y, what max_pool_backward needs). Padding never wins."""

    @abstractmethod
    def max_pool_backward(self, dy: Array, saved: Array, x_shape: Shape, window: Window) -> Array:
        """Each element of dy goes to the first greatest element of its window."""

    @abstractmethod
    def average_pool(self, x: Array, window: Window) -> Array:
        """Mean over the elements of the image in each window; padding does not count."""

    @abstractmethod
    def average_pool_backward(self, dy: Array, x_shape: Shape, window: Window) -> Array:
        """Gradient of average_pool's x."""

    @abstractmethod
    def moments(self, x: Array) -> tuple[Array, Array]:
        """Mean and biased variance of [..., c] over all axes but the last; 0 and 0 of nothing.

        They are at least float32, also where x is narrow; so are mean, variance, scale and offset
        and their gradients below.
        """

    @abstractmethod
    def normalize(
        self,
        x: Array,
        mean: Array,
        variance: Array,
        scale: Array,
        offset: Array,
        epsilon: float,
        add: Array | None = None,
        relu: bool = False,
    ) -> Array:
        """(x − mean)/√(variance + ε)·scale + offset along the last axis.

        To that `add`, like x, is added; then the ReLU is taken.
        """

    @abstractmethod
    def normalize_backward(
        self,
        dy: Array,
        x: Array,
        mean: Array,
        variance: Array,
        scale: Array,
        epsilon: float,
        moments: bool,
        y: Array | None = None,
        add: bool = False,
    ) -> tuple[Array, Array, Array, Array | None]:
        """Gradients of normalize's (x, scale, offset, add); the last one None unless `add`.

        With `moments`, mean and variance are those of x itself and depend on it. Given y, the
        ReLU's result, dy counts where y > 0 only.
        """

    @abstractmethod
    def layer_norm(self, x: Array, scale: Array, offset: Array, epsilon: float) -> Array:
        """(x − mean)/√(variance + ε)·scale + offset, of [..., c] by the moments of each row.

        Scale and offset [c] and their gradients are at least float32, also where x is narrow.
        """

    @abstractmethod
    def layer_norm_backward(
        self, dy: Array, x: Array, scale: Array, epsilon: float
    ) -> tuple[Array, Array, Array]:
        """Gradients of layer_norm's (x, scale, offset)."""

    # -- attention ---------------------------------------------------------------------------------

    @abstractmethod
    def causal_attention(self, qkv: Array, heads: int) -> Array:
        """softmax(q·kᵀ/√size)·v of each token over itself and those before, [n, t, heads·size].

        qkv [n, t, 3·heads·size] has the queries of a token, head by head, then its keys, then its
        values.
        """

    @abstractmethod
    def causal_attention_backward(self, dy: Array, qkv: Array, heads: int) -> Array:
        """Gradient of causal_attention's qkv."""

    # -- losses ------------------------------------------------------------------------------------

    @abstractmethod
    def softmax(self, x: Array) -> Array:
        """exp(x)/Σ exp(x) along the last axis."""

    @abstractmethod
    def log_softmax(self, x: Array) -> Array:
        """x − log Σ exp(x) along the last axis."""

    @abstractmethod
    def softmax_cross_entropy(self, logits: Array, labels: Array) -> tuple[Array, Array]:
        """[n, k] and int64 [n] -> losses [n] and their gradient softmax − onehot [n, k]."""

    # -- variables: in place, over lists of tensors, one call for a whole model ------------

    @abstractmethod
    def sgd(self, weights: Tensors, gradients: Tensors, **how: Unpack[Update]) -> None:
        """w −= lr·g', where here and below g' is what becomes of the gradient first; see Update."""

    @abstractmethod
    def momentum(
        self,
        weights: Tensors,
        gradients: Tensors,
        momenta: Tensors,
        **how: Unpack[MomentumUpdate],
    ) -> None:
        """m = μ·m + g'; w −= lr·m, with Nesterov w −= lr·(g' + μ·m)."""

    @abstractmethod
    def rmsprop(
        self,
        weights: Tensors,
        gradients: Tensors,
        squares: Tensors,
        momenta: Tensors,
        **how: Unpack[RMSPropUpdate],
    ) -> None:
        """s = ρ·s + (1−ρ)·g'²; m = μ·m + lr·g'/√(s + ε); w −= m."""

    @abstractmethod
    def adam(
        self,
        weights: Tensors,
        gradients: Tensors,
        firsts: Tensors,
        seconds: Tensors,
        **how: Unpack[AdamUpdate],
    ) -> None:
        """Algorithm 1 of Kingma and Ba, `step` counted from 1."""

    @abstractmethod
    def sum(
        self,
        destinations: Sequence[Tensors],
        sources: Sequence[Tensors],
        *,
        weights: Sequence[float] | None = None,
        scale: float = 1.0,
        threads: int = 1,
    ) -> None:
        """destinations[d][t] = ((w0·s0[t] + w1·s1[t]) + …)·scale, in the order of the sources.

        A destination may be the very same array as a source. Sources may be narrow; they are
        added up in float32, and their destinations are float32 or of the same dtype.
        """

    @abstractmethod
    def sum_squares(self, tensors: Tensors, *, threads: int) -> float:
        """Σ x² over all elements, in float64; the same bits for any number of threads."""

    @abstractmethod
    def first_nonfinite(self, tensors: Tensors) -> int:
        """Index of the first tensor that holds a NaN or an infinity, −1 if none does."""
