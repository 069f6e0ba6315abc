"""TensorFlow: MirroredStrategy in one process, one logical CPU for each replica.

    python tensorflow_peer.py --workload lenet       # pip install tensorflow-cpu

Its best settings on CPUs: oneDNN, which it turns on by itself only on some, the whole step in a
tf.function, channels last, fused kernels for batch norm and the update. All logical CPUs share one
pool of threads for the insides of operations; one thread there, and one operation at a time for
each replica, is what gives a replica one compute thread.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import job as jobs
from networks import EPSILON, KEPT, MOMENTUM, NETWORKS, RATE, Layer, shapes

WORKLOADS = (*NETWORKS, "allreduce", "optimizer", "merge_call", "input", "jpeg", "import")
ASKED = jobs.asked(__doc__, WORKLOADS, jobs.PHOTOS)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
tf: Any = None  # once it is wanted: `import` times fresh interpreters only


def answer(variant: str, *args: Any, **more: Any) -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("tensorflow-cpu")
    except PackageNotFoundError:
        found = version("tensorflow")
    jobs.answer("tensorflow", found, ASKED, variant, *args, **more)


def strategy() -> Any:
    """Import TensorFlow, limit its threads, and make a device for each replica."""
    global tf
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(ASKED.threads)
    tf.config.threading.set_inter_op_parallelism_threads(ASKED.replicas)
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * ASKED.replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(ASKED.replicas)])


# --- training -----------------------------------------------------------------------------------

Take = Callable[..., Any]  # (shape, initial value) → the next parameter


def forward(layers: list[Layer], x: Any, take: Take, moments: list[Any]) -> Any:
    """Return what comes out of layers; `moments` gets each batch norm's mean and variance."""
    for kind, *how in layers:
        if kind == "conv":
            size, channels, stride, bias = how
            around = size // 2
            filters = take((size, size, x.shape[-1], channels), None)
            padding = [[0, 0], [around, around], [around, around], [0, 0]]
            if stride == 1 or size == 1:  # the same zeros, which it knows by this name
                padding = "SAME"
            x = tf.nn.conv2d(x, filters, stride, padding)
            if bias:
                x = tf.nn.bias_add(x, take((channels,), 0.0))
        elif kind == "norm":
            channels = x.shape[-1:]
            x, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=x,
                scale=take(channels, 1.0),
                offset=take(channels, 0.0),
                mean=tf.zeros([0]),
                variance=tf.zeros([0]),
                epsilon=EPSILON,
                is_training=True,
            )
            moments += [mean, variance]
        elif kind == "relu":
            x = tf.nn.relu(x)
        elif kind == "pool":
            size, stride, around = how
            if around:  # what is pooled comes out of a ReLU, so zeros do not matter
                x = tf.pad(x, [[0, 0], [around, around], [around, around], [0, 0]])
            x = tf.nn.max_pool2d(x, size, stride, "VALID")
        elif kind == "mean":
            x = tf.reduce_mean(x, (1, 2))
        elif kind == "flatten":
            x = tf.reshape(x, (x.shape[0], -1))
        elif kind == "dense":
            x = tf.nn.bias_add(x @ take((x.shape[-1], how[0]), None), take((how[0],), 0.0))
        elif kind == "block":
            y = forward(how[0], x, take, moments)
            x = tf.nn.relu(y + forward(how[1], x, take, moments))
    return x


def training() -> None:
    network = NETWORKS[ASKED.workload]
    batch = ASKED.batch or network.batch
    mirrored = strategy()
    parameters: list[Any] = []
    moments: list[Any] = []

    def make(shape: Any, value: float | None) -> Any:
        start = tf.fill(shape, value) if value is not None else _drawn(shape)
        parameters.append(tf.Variable(start))
        return parameters[-1]

    with mirrored.scope():
        forward(network.layers, tf.zeros((1, *network.image)), make, moments)
        momenta = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in parameters]
        moving = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in moments]

    def placed(draw: Callable[[], Any]) -> Any:
        return mirrored.experimental_distribute_values_from_function(lambda _: draw())

    batches = [
        (
            placed(lambda: tf.random.normal((batch, *network.image))),
            placed(lambda: tf.random.uniform((batch,), 0, network.classes, tf.int32)),
        )
        for _ in range(network.batches)
    ]

    def replica(images: Any, labels: Any) -> Any:
        in_order, found = iter(parameters), []
        with tf.GradientTape() as tape:
            logits = forward(network.layers, images, lambda *_: next(in_order), found)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, parameters)
        here = tf.distribute.get_replica_context()
        gradients = here.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for weight, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
            if network.decay:
                gradient = gradient + network.decay * weight
            apply_momentum(weight, gradient, momentum)
        for kept, new in zip(moving, found, strict=True):
            value = KEPT * kept + (1 - KEPT) * new
            tf.raw_ops.AssignVariableOp(resource=kept.handle, value=value)
        return loss

    @tf.function
    def one_step(images: Any, labels: Any) -> Any:
        losses = mirrored.run(replica, (images, labels))
        return mirrored.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    measured = jobs.train(ASKED, lambda i: float(one_step(*batches[i % len(batches)])))
    answer(
        "mirrored",
        measured.seconds,
        ASKED.replicas * batch,
        "images/s",
        batch=batch,
        params=sum(int(tf.size(each)) for each in parameters),
        **measured.told(),
    )


def _drawn(shape: Any) -> Any:
    fan = 1
    for length in shape[:-1]:
        fan *= length
    return tf.random.normal(shape, stddev=(2 / fan) ** 0.5, seed=0)


def apply_momentum(weight: Any, gradient: Any, momentum: Any) -> None:
    tf.raw_ops.ResourceApplyMomentum(
        var=weight.handle, accum=momentum.handle, lr=RATE, grad=gradient, momentum=MOMENTUM
    )


# --- the rest -----------------------------------------------------------------------------------


def sums() -> None:
    mirrored = strategy()
    here = tf.distribute.get_replica_context

    @tf.function
    def summed(given: Any) -> Any:
        return mirrored.run(lambda x: here().all_reduce(tf.distribute.ReduceOp.SUM, x), (given,))

    @tf.function
    def empty(given: Any) -> Any:
        return mirrored.run(lambda x: x, (given,))

    for size, often in jobs.SUMS.items():
        given = mirrored.experimental_distribute_values_from_function(
            lambda _, size=size: tf.zeros((size * 256,))
        )
        for variant, call in (("mirrored", summed), ("empty", empty)):
            times = often * ASKED.steps
            seconds = jobs.timed(times, ASKED.warmup, lambda call=call, x=given: call(x))
            answer(variant, seconds, 1024e-9 * size, "GB/s", batch=size)


def optimizer() -> None:
    strategy()
    weights = [tf.Variable(tf.random.normal(shape)) for shape in shapes("resnet50")]
    firsts, seconds = ([tf.Variable(tf.zeros(w.shape)) for w in weights] for _ in range(2))
    gradients = [tf.random.normal(w.shape) * 0.01 for w in weights]

    @tf.function
    def sgdm() -> None:
        for weight, gradient, momentum in zip(weights, gradients, firsts, strict=True):
            apply_momentum(weight, gradient, momentum)

    @tf.function
    def adam() -> None:
        for weight, gradient, m, v in zip(weights, gradients, firsts, seconds, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle,
                m=m.handle,
                v=v.handle,
                grad=gradient,
                lr=1e-3,
                beta1=0.9,
                beta1_power=0.9,
                beta2=0.999,
                beta2_power=0.999,
                epsilon=1e-8,
            )

    for name, rule in (("sgdm", sgdm), ("adam", adam)):
        nbytes = 4 * jobs.WORDS[name] * NETWORKS["resnet50"].parameters
        times = jobs.timed(ASKED.steps, ASKED.warmup, rule)
        answer(f"{name}-resource-apply", times, nbytes / 1e9, "GB/s")


def merges() -> None:
    mirrored = strategy()
    here = tf.distribute.get_replica_context
    as_it_is = tf.autograph.experimental.do_not_convert

    def merging(times: int) -> Callable[[], None]:
        def fn() -> None:
            for _ in range(times):
                here().merge_call(lambda strategy: None)

        return as_it_is(fn)

    def trace(fn: Callable[[], None]) -> None:
        tf.function(lambda: mirrored.run(fn), autograph=False).get_concrete_function()

    none, many = merging(0), merging(jobs.MERGES)
    for how, call in (("eager", mirrored.run), ("traced", trace)):
        empty = jobs.timed(5 * ASKED.steps, ASKED.warmup, lambda call=call: call(none))
        answer(f"run-{how}", empty, 1, "us")
        full = jobs.timed(ASKED.steps, ASKED.warmup, lambda call=call: call(many))
        less = statistics.median(empty)
        answer(f"merge_call-{how}", [each - less for each in full], jobs.MERGES, "us")
    graph = tf.function(lambda: mirrored.run(none), autograph=False)
    answer("run-graph", jobs.timed(50 * ASKED.steps, ASKED.warmup, graph), 1, "us")


def pipelines() -> None:
    import numpy as np

    strategy()
    images = tf.constant(np.random.randint(0, 256, (jobs.EXAMPLES, 32, 32, 3), np.uint8))
    labels = tf.random.uniform((jobs.EXAMPLES,), 0, 10, tf.int32)
    mean, scale = tf.constant(jobs.MEAN), 1 / tf.constant(jobs.STD)
    rows = tf.range(32)
    batch = ASKED.batch or jobs.INPUT_BATCH

    def one(i: Any) -> Any:
        padded = tf.pad(images[i], [[4, 4], [4, 4], [0, 0]])
        crop = tf.image.random_flip_left_right(tf.image.random_crop(padded, (32, 32, 3)))
        return (tf.cast(crop, tf.float32) - mean) * scale, labels[i]

    def many(chosen: Any) -> Any:
        padded = tf.pad(tf.gather(images, chosen), [[0, 0], [4, 4], [4, 4], [0, 0]])
        tops, lefts = (tf.random.uniform((batch, 1), 0, 9, tf.int32) for _ in range(2))
        mirror = tf.random.uniform((batch, 1)) < 0.5
        columns = lefts + tf.where(mirror, rows[::-1], rows)
        crops = tf.gather(padded, tops + rows, axis=1, batch_dims=1)
        crops = tf.gather(tf.transpose(crops, (0, 2, 1, 3)), columns, axis=1, batch_dims=1)
        crops = tf.transpose(crops, (0, 2, 1, 3))
        return (tf.cast(crops, tf.float32) - mean) * scale, tf.gather(labels, chosen)

    order = tf.data.Dataset.range(jobs.EXAMPLES).shuffle(jobs.EXAMPLES).repeat()
    for name, more in (("per_sample", 1), ("batched", 5)):
        for workers in (0, 1, 2):
            how = {"num_parallel_calls": workers} if workers else {}
            if name == "per_sample":
                dataset = order.map(one, **how).batch(batch, drop_remainder=True)
            else:
                dataset = order.batch(batch, drop_remainder=True).map(many, **how)
            options = tf.data.Options()
            options.threading.private_threadpool_size = max(1, workers)
            batches = iter((dataset.prefetch(4) if workers else dataset).with_options(options))
            seconds, cores = jobs.busy_window(ASKED, more * ASKED.steps, lambda x=batches: next(x))
            answer(
                f"{name}-workers{workers}",
                seconds,
                batch,
                "images/s",
                batch=batch,
                cores_used=round(cores, 2),
            )


def photographs() -> None:
    """Decode a random part of each file, flip, resize and scale it; as tf_cnn_benchmarks does."""
    strategy()
    files = jobs.photos(ASKED)
    batch = ASKED.batch or jobs.PHOTO_BATCH

    def one(content: Any) -> Any:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(content),
            tf.zeros((1, 0, 4)),
            min_object_covered=0.1,
            aspect_ratio_range=(0.75, 1.33),
            area_range=(0.05, 1.0),
            max_attempts=100,
            use_image_if_no_bounding_boxes=True,
        )
        box = tf.concat((begin[:2], size[:2]), 0)
        image = tf.image.decode_and_crop_jpeg(content, box, channels=3)
        image = tf.image.random_flip_left_right(image)
        image = tf.compat.v1.image.resize_images(image, (jobs.PHOTO_SIZE, jobs.PHOTO_SIZE))
        return image / 127.5 - 1

    for workers in jobs.WORKERS:
        how = {"num_parallel_calls": workers} if workers else {}
        dataset = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
        dataset = dataset.map(one, **how).batch(batch)
        options = tf.data.Options()
        options.threading.private_threadpool_size = max(1, workers)
        batches = iter((dataset.prefetch(4) if workers else dataset).with_options(options))
        seconds, cores = jobs.busy_window(ASKED, ASKED.steps, lambda x=batches: next(x))
        answer(
            f"workers{workers}", seconds, batch, "images/s", batch=batch, cores_used=round(cores, 2)
        )


_STRATEGY = """
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).run(lambda: None)
"""


def start() -> None:
    for variant, code in (("import", "import tensorflow"), ("two replicas", _STRATEGY)):
        seconds, memory = jobs.fresh(ASKED, code)
        answer(variant, seconds, 1, "s", memory=memory)
    size = max(jobs.megabytes("tensorflow-cpu"), jobs.megabytes("tensorflow"))
    answer("size with dependencies", [1.0], size, "MB", memory=0.0)


OTHERS = {
    "allreduce": sums,
    "optimizer": optimizer,
    "merge_call": merges,
    "input": pipelines,
    "jpeg": photographs,
    "import": start,
}


if __name__ == "__main__":
    OTHERS.get(ASKED.workload, training)()
