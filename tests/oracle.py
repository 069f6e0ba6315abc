"""The variable policies as plain sequential loops over NumPy arrays, written from formulas alone.

Nothing of minidist is used here. Every constant is rounded once to the element type (what is known
in advance, such as 1 - beta or 1/n, is computed before that), and every step of the arithmetic is
then done in that type, one operation after another; so results can be compared bit for bit.
"""

from __future__ import annotations

import math

import numpy as np

INDEPENDENT, SHARED = "independent", "shared"
STAGED, RELAXED = "staged", "relaxed"

# Each rule: (weights, gradient, slots, number of the step from 1, constants, rounding) gives new
# weights. `slots` is a dict of arrays that the rule keeps and replaces.


def sgd(w, g, slots, step, c, r):
    return w - r(c["lr"]) * g


def momentum(w, g, slots, step, c, r):
    m = r(c["momentum"]) * slots.get("m", np.zeros_like(w)) + g
    slots["m"] = m
    return w - r(c["lr"]) * m


def nesterov(w, g, slots, step, c, r):
    m = r(c["momentum"]) * slots.get("m", np.zeros_like(w)) + g
    slots["m"] = m
    return w - r(c["lr"]) * (g + r(c["momentum"]) * m)


def rmsprop(w, g, slots, step, c, r):
    s = r(c["decay"]) * slots.get("s", np.ones_like(w)) + r(1 - c["decay"]) * (g * g)
    scaled = r(c["lr"]) * g / np.sqrt(s + r(c["epsilon"]))
    m = r(c["momentum"]) * slots.get("m", np.zeros_like(w)) + scaled
    slots["s"], slots["m"] = s, m
    return w - m


def adam(w, g, slots, step, c, r):
    m = r(c["beta1"]) * slots.get("m", np.zeros_like(w)) + r(1 - c["beta1"]) * g
    v = r(c["beta2"]) * slots.get("v", np.zeros_like(w)) + r(1 - c["beta2"]) * (g * g)
    slots["m"], slots["v"] = m, v
    # With m̂ = m/(1 − β1^t) and v̂ = v/(1 − β2^t), lr·m̂/(√v̂ + ε) is rate·m/(√v + ε·root).
    root = math.sqrt(1 - c["beta2"] ** step)
    rate = c["lr"] * root / (1 - c["beta1"] ** step)
    return w - r(rate) * m / (np.sqrt(v) + r(c["epsilon"] * root))


RULES = {"sgd": sgd, "momentum": momentum, "nesterov": nesterov, "rmsprop": rmsprop, "adam": adam}


# Each way to combine one variable's gradients: of the replicas' gradients, their counts and the
# rounding it makes a sum, and what the sum is then to be multiplied by.


def mean(gradients, counts, r):
    """The mean over replicas. With counts that differ each weighs as much as it has examples."""
    if counts is None or len(set(counts)) == 1:
        return in_order(gradients), 1 / len(gradients)
    return in_order([r(c) * g for c, g in zip(counts, gradients, strict=True)]), 1 / sum(counts)


def total(gradients, counts, r):
    """The sum over replicas, whatever the counts."""
    return in_order(gradients), 1.0


def in_order(gradients):
    """Return the sum over replicas in their order."""
    result = gradients[0]
    for gradient in gradients[1:]:
        result = result + gradient
    return result


def accumulated(batches, counts):
    """Return one replica's gradients of several batches as those of one, and its count.

    `batches[j][i]`; `counts[j]`, or None. A batch without examples has no say.
    """
    weights = [1] * len(batches) if counts is None else counts
    gradients = []
    for column in zip(*batches, strict=True):
        r = column[0].dtype.type
        parts = [r(c) * g for c, g in zip(weights, column, strict=True) if c]
        gradients.append(in_order(parts) * r(1 / sum(weights)) if parts else 0 * column[0])
    return gradients, counts and sum(counts)


class Oracle:
    """Training under a policy, as one loop: `weights[replica][i]` after each `step`.

    kind: INDEPENDENT, where each replica goes its own way, or SHARED: all other synchronous
    policies, which differ in who does the arithmetic but not in the arithmetic.
    late: what is a step late. STAGED: replicas compute in step t with W(max(t - 2, 0)), W(t) being
    the weights after step t; see `reads`. RELAXED: step t applies the gradients that step t - 1
    was given, and the first one zeros.
    starts: the first weights of each replica. decays: for each variable, whether weight decay
    applies. Without any example behind a gradient (all counts that it depends on are 0) there is
    no step.

    A gradient is divided by the loss scale, clipped to +-clip, or by global norm to clip_norm, and
    then decayed.
    """

    def __init__(
        self,
        kind,
        rule,
        starts,
        *,
        late=None,
        weight_decay=0.0,
        decays=None,
        combine=mean,
        clip=None,
        clip_norm=None,
        loss_scale=1.0,
        **constants,
    ):
        self.kind = kind
        self.late = late
        self.clip, self.clip_norm, self.loss_scale = clip, clip_norm, loss_scale
        self.rule = RULES[rule]
        self.combine = combine
        self.constants = constants
        self.weight_decay = weight_decay
        self.decays = decays or [True] * len(starts[0])
        self.weights = [[np.array(w) for w in start] for start in starts]
        if kind == SHARED:
            self.weights = [self.weights[0]] * len(starts)
        self.slots = [[{} for _ in start] for start in starts]
        self.steps = [0] * len(starts)
        self.history = [list(self.weights)]  # W(0), W(1), ...
        self._waiting = [(np.zeros_like(w), 1.0) for w in self.weights[0]]

    @property
    def iterations(self):
        """The number of steps; of the replica that took most where they go their own ways."""
        return max(self.steps)

    @property
    def reads(self):
        """What each replica computes with in the next step."""
        return self.history[max(len(self.history) - 2, 0)] if self.late == STAGED else self.weights

    def step(self, gradients, counts=None):
        """Apply `gradients[replica][i]`; None where a replica did not use a variable."""
        n = len(gradients)
        if self.kind == INDEPENDENT:
            for replica in range(n):
                if counts is None or counts[replica]:
                    self._apply(replica, [g if g is None else (g, 1.0) for g in gradients[replica]])
            return
        merged = None
        if counts is None or any(counts):
            columns = zip(*gradients, strict=True)
            merged = [self._merge(i, column, counts) for i, column in enumerate(columns)]
        if self.late == RELAXED:
            merged, self._waiting = self._waiting, merged
        if merged is not None:
            self._apply(0, merged)
            self.weights = [self.weights[0]] * n
            self.history.append(list(self.weights))

    def _merge(self, i, gradients, counts):
        """Return the sum of one variable's gradients and its factor; None: nobody used it."""
        if all(gradient is None for gradient in gradients):
            return None
        like = self.weights[0][i]
        filled = [np.zeros_like(like) if gradient is None else gradient for gradient in gradients]
        return self.combine(filled, counts, like.dtype.type)

    def _scaled(self, gradients):
        """Return sums times their factors, clipped."""
        there = [pair for pair in gradients if pair is not None]
        factor = there[0][1] * (1 / self.loss_scale)  # the same for all
        if self.clip_norm is not None:
            squares = [float((np.asarray(g, float) ** 2).sum()) for g, _ in there]
            norm = math.sqrt(math.fsum(squares)) * factor
            factor *= min(1.0, self.clip_norm / norm) if norm else 1.0
        for pair in gradients:
            g = None if pair is None else pair[0] * pair[0].dtype.type(factor)
            if g is not None and self.clip is not None:
                g = np.clip(g, -g.dtype.type(self.clip), g.dtype.type(self.clip))
            yield g

    def _apply(self, replica, gradients):
        self.steps[replica] += 1
        weights = list(self.weights[replica])
        for i, (w, g) in enumerate(zip(weights, self._scaled(gradients), strict=True)):
            if g is not None:
                r = w.dtype.type
                if self.weight_decay and self.decays[i]:
                    g = g + r(self.weight_decay) * w
                new = self.rule(
                    w, g, self.slots[replica][i], self.steps[replica], self.constants, r
                )
                weights[i] = np.asarray(new)
        self.weights[replica] = weights


class TwoLayers:
    """logits = gain * (square(x @ a + b) @ c + d), softmax cross-entropy: its gradient by hand.

    Smooth everywhere, so rounding cannot push an example over a kink.
    """

    shapes = ((7, 5), (5,), (5, 3), (3,), ())  # a, b, c, d, gain
    features, classes = 7, 3

    @classmethod
    def start(cls, rng, dtype):
        return [np.asarray(rng.normal(0.5, 0.3, shape), dtype) for shape in cls.shapes]

    @staticmethod
    def gradients(weights, x, labels):
        """Return the gradients of the mean loss over the examples; zeros where there are none."""
        a, b, c, d, gain = weights
        if not len(x):
            return [np.zeros_like(w) for w in weights]
        z = x @ a + b
        h = z * z
        u = h @ c + d
        logits = gain * u
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True)
        p[np.arange(len(x)), labels] -= 1
        dlogits = p / p.dtype.type(len(x))
        du = gain * dlogits
        dz = 2 * z * (du @ c.T)
        return [x.T @ dz, dz.sum(axis=0), h.T @ du, du.sum(axis=0), (dlogits * u).sum()]

    @staticmethod
    def loss(weights, x, labels):
        a, b, c, d, gain = weights
        logits = gain * (np.square(x @ a + b) @ c + d)
        shifted = logits - logits.max(axis=1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(x)), labels]
        return losses.mean() if len(x) else 0.0


def split(count, n):
    """Return how many of `count` examples each of n replicas gets: even, the larger first."""
    return [count // n + (i < count % n) for i in range(n)]


def relative_norm(results, expected):
    """Return |results - expected| / |expected| over lists of arrays, in float64."""

    def flat(arrays):
        return np.concatenate([np.ravel(array).astype(float) for array in arrays])

    return np.linalg.norm(flat(results) - flat(expected)) / np.linalg.norm(flat(expected))
