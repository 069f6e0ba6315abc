"""JAX: one process, one device of the host for each replica, gradients averaged in a shard_map.

    python jax_peer.py --workload mlp        # pip install jax optax

Its best settings on CPUs: the whole step in one jit whose state is donated, so that it is updated
in place. XLA gives each device one thread where it is told that operations shall not share any.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from typing import Any

import job as jobs
from networks import DECAY, EPSILON, KEPT, MOMENTUM, NETWORKS, RATE, Layer, shapes

ASKED = jobs.asked(__doc__, (*NETWORKS, "allreduce", "optimizer", "import"))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = str(ASKED.replicas * ASKED.threads)
os.environ["XLA_FLAGS"] = " ".join(
    (
        f"--xla_force_host_platform_device_count={ASKED.replicas}",
        f"--xla_cpu_multi_thread_eigen={str(ASKED.threads > 1).lower()}",
        os.environ.get("XLA_FLAGS", ""),
    )
)
if ASKED.workload != "import":  # which times fresh interpreters only
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    EVERY, OWN = PartitionSpec(), PartitionSpec("replicas")
    MESH = Mesh(np.array(jax.devices()), ("replicas",))


def answer(variant: str, *args: Any, **more: Any) -> None:
    from importlib.metadata import version

    jobs.answer("jax", version("jax"), ASKED, variant, *args, **more)


def mapped(fn: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Return `fn` once for each replica, each with its shard of what is its own."""
    return jax.shard_map(fn, mesh=MESH, in_specs=inputs, out_specs=outputs, check_vma=False)


# --- training -----------------------------------------------------------------------------------


def forward(layers: list[Layer], x: Any, take: Callable[[], Any], moments: list[Any]) -> Any:
    """Return what comes out of layers; `take` gives their parameters in order."""
    for kind, *how in layers:
        if kind == "conv":
            size, _, stride, bias = how
            x = lax.conv_general_dilated(
                x,
                take(),
                (stride, stride),
                [(size // 2, size // 2)] * 2,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = x + take() if bias else x
        elif kind == "norm":  # one pass over x for both moments
            scale, offset = take(), take()
            mean = x.mean((0, 1, 2))
            variance = (x * x).mean((0, 1, 2)) - mean * mean
            moments += [mean, variance]
            factor = scale * lax.rsqrt(variance + EPSILON)
            x = x * factor + (offset - mean * factor)
        elif kind == "relu":
            x = jax.nn.relu(x)
        elif kind == "pool":
            size, stride, around = how
            window, strides = (1, size, size, 1), (1, stride, stride, 1)
            padding = [(0, 0), (around, around), (around, around), (0, 0)]
            x = lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
        elif kind == "mean":
            x = x.mean((1, 2))
        elif kind == "flatten":
            x = x.reshape(x.shape[0], -1)
        elif kind == "dense":
            x = x @ take() + take()
        elif kind == "block":
            y = forward(how[0], x, take, moments)
            x = jax.nn.relu(y + forward(how[1], x, take, moments))
    return x


def drawn(name: str) -> list[Any]:
    """Return initial values: He's of filters and matrices, 1 of a scale, 0 of an offset or bias.

    A vector is a scale where a vector follows it.
    """
    random, of = np.random.default_rng(0), shapes(name)
    made = []
    for shape, following in zip(of, [*of[1:], ()], strict=True):
        if len(shape) > 1:
            deviation = (2 / prod(shape[:-1])) ** 0.5
            made.append(random.standard_normal(shape, np.float32) * np.float32(deviation))
        else:
            is_scale = len(following) == 1 and not (made and made[-1].ndim == 1)
            made.append(np.full(shape, float(is_scale), np.float32))
    return made


def training() -> None:
    network, replicas = NETWORKS[ASKED.workload], ASKED.replicas
    batch = ASKED.batch or network.batch
    shared, own = NamedSharding(MESH, EVERY), NamedSharding(MESH, OWN)
    weights = [jax.device_put(value, shared) for value in drawn(ASKED.workload)]
    momenta = [jax.device_put(np.zeros_like(value), shared) for value in weights]
    random = np.random.default_rng(1)
    batches = [
        (
            jax.device_put(
                random.standard_normal((replicas * batch, *network.image), np.float32), own
            ),
            jax.device_put(random.integers(0, network.classes, replicas * batch), own),
        )
        for _ in range(network.batches)
    ]

    def loss_of(weights: list[Any], images: Any, labels: Any) -> Any:
        in_order, moments = iter(weights), []
        logits = forward(network.layers, images, lambda: next(in_order), moments)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean(), moments

    def one_step(weights: Any, momenta: Any, moving: Any, images: Any, labels: Any) -> Any:
        both = jax.value_and_grad(loss_of, has_aux=True)
        (loss, moments), gradients = both(weights, images, labels)
        loss, gradients = lax.pmean((loss, gradients), "replicas")
        if network.decay:
            gradients = [g + DECAY * w for g, w in zip(gradients, weights, strict=True)]
        momenta = [MOMENTUM * m + g for m, g in zip(momenta, gradients, strict=True)]
        weights = [w - RATE * m for w, m in zip(weights, momenta, strict=True)]
        moving = [KEPT * a + (1 - KEPT) * b for a, b in zip(moving, moments, strict=True)]
        return weights, momenta, moving, loss

    found = jax.eval_shape(loss_of, weights, *(each[:batch] for each in batches[0]))[1]
    moving = [jax.device_put(np.zeros(replicas * m.shape[0], np.float32), own) for m in found]
    kept = (EVERY, EVERY, OWN)
    compiled = jax.jit(
        mapped(one_step, (*kept, OWN, OWN), (*kept, EVERY)), donate_argnums=(0, 1, 2)
    )
    state = weights, momenta, moving

    def step(i: int) -> float:
        nonlocal state
        *state, loss = jax.block_until_ready(compiled(*state, *batches[i % len(batches)]))
        return float(loss)

    measured = jobs.train(ASKED, step)
    answer(
        "shard_map",
        measured.seconds,
        replicas * batch,
        "images/s",
        batch=batch,
        params=sum(map(prod, shapes(ASKED.workload))),
        **measured.told(),
    )


# --- the rest -----------------------------------------------------------------------------------


def sums() -> None:
    own = NamedSharding(MESH, OWN)
    for size, often in jobs.SUMS.items():
        bodies = {"psum": lambda x: lax.psum(x, "replicas"), "empty": lambda x: x}
        for variant, body in bodies.items():
            buffer = jax.device_put(np.zeros(ASKED.replicas * size * 256, np.float32), own)
            compiled = jax.jit(mapped(body, OWN, OWN), donate_argnums=0)

            def call(compiled: Any = compiled) -> None:
                nonlocal buffer
                buffer = jax.block_until_ready(compiled(buffer))

            seconds = jobs.timed(often * ASKED.steps, ASKED.warmup, call)
            answer(variant, seconds, 1024e-9 * size, "GB/s", batch=size)


def optimizer() -> None:
    import optax

    def drawn_at(scale: float) -> list[Any]:
        random = np.random.default_rng(0)
        return [
            jnp.asarray(random.standard_normal(shape, np.float32) * np.float32(scale))
            for shape in shapes("resnet50")
        ]

    gradients = drawn_at(0.01)
    rules = {"sgdm": optax.sgd(RATE, MOMENTUM), "adam": optax.adam(1e-3)}
    for name, rule in rules.items():

        def update(weights: Any, gradients: Any, state: Any, rule: Any = rule) -> Any:
            changes, state = rule.update(gradients, state, weights)
            return optax.apply_updates(weights, changes), state

        compiled = jax.jit(update, donate_argnums=(0, 2))
        weights = drawn_at(1.0)
        state = rule.init(weights)

        def call(compiled: Any = compiled) -> None:
            nonlocal weights, state
            weights, state = jax.block_until_ready(compiled(weights, gradients, state))

        nbytes = 4 * jobs.WORDS[name] * NETWORKS["resnet50"].parameters
        seconds = jobs.timed(ASKED.steps, ASKED.warmup, call)
        answer(f"{name}-optax", seconds, nbytes / 1e9, "GB/s")


_MESH = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()), ("replicas",))
assert mesh.size == 2
sharding = NamedSharding(mesh, PartitionSpec("replicas"))
jax.device_put(np.zeros(2), sharding).block_until_ready()
"""


def start() -> None:
    for variant, code in (("import", "import jax"), ("two replicas", _MESH)):
        seconds, memory = jobs.fresh(ASKED, code)
        answer(variant, seconds, 1, "s", memory=memory)
    answer("size with dependencies", [1.0], jobs.megabytes("jax"), "MB", memory=0.0)


OTHERS = {"allreduce": sums, "optimizer": optimizer, "import": start}

if __name__ == "__main__":
    OTHERS.get(ASKED.workload, training)()
