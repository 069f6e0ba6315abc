"""What policies cost: with more and more devices, staged beside unstaged, threads beside processes.

    python bench/policies.py                         # all, some minutes
    python bench/policies.py growth --plot=docs/cost_growth.svg
    python bench/policies.py staged processes

growth: n virtual devices with a fixed batch each. "More" is a step of the policy less the forward
and backward pass alone on the same n devices; "allowed" is 1.25 × (bytes the policy touches ÷ the
speed of a copy, which touches each byte twice) + n × 150 us. Both alternate within a round.

Figures are medians of rounds, with the lowest and highest round beside them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from overhead import median_time

import minidist as md
from minidist import threads
from minidist.train import train_step

ROUNDS = 9
GROWTH_ROUNDS = 5
POLICIES = {
    "independent": ("independent", {}),
    "parameter_server": ("parameter_server", {}),
    "parameter_server+staged_vars": ("parameter_server", {"staged_vars": True}),
    "replicated": ("replicated", {}),
    "replicated+relaxed": ("replicated", {"variable_consistency": "relaxed"}),
}


def show(name: str, rounds: Sequence[float], unit: str, target: str = "") -> None:
    middle, low, high = statistics.median(rounds), min(rounds), max(rounds)
    print(f"{name:<52}{middle:>9.2f} {unit:<3} [{low:.2f} .. {high:.2f}]  {target}", flush=True)


# --- cost growth --------------------------------------------------------------------------------


def touched(policy: str, n: int, size: int) -> int:
    """Return how many bytes a step reads and writes besides computing, momentum's rule.

    An update reads weight, gradient and momentum and writes weight and momentum. A sum reads each
    replica's gradient and writes each copy's. A fetch reads and writes.
    """
    update, one = 5 * size, n == 1
    if policy == "independent":
        return n * update
    if policy.startswith("replicated"):
        return n * update + (0 if one else 2 * n * size)
    return update + (n + 1) * size + n * 2 * size


SOURCE, DESTINATION = np.ones(1 << 25, np.float32), np.ones(1 << 25, np.float32)  # 128 MiB each


def copy_speed() -> float:
    """Return bytes touched per second by one thread's copy of arrays that no cache holds."""
    return 2 * SOURCE.nbytes / median_time(lambda: np.copyto(DESTINATION, SOURCE), 3)


class Job:
    """A model under a policy, and what its replicas are given."""

    def __init__(self, policy: str, n: int, model: str, shape: tuple[int, ...], batch: int) -> None:
        name, options = POLICIES[policy]
        self.strategy = md.Strategy(f"cpu*{n}", name, **options)
        with self.strategy.scope():
            self.model = md.models.build(model, shape, 10)
        self.optimizer = md.optim.Momentum(0.001)

        def batch_of_a_replica() -> tuple[md.Tensor, md.Tensor]:
            replica = md.get_replica_context()
            assert replica is not None
            generator = np.random.default_rng(replica.replica_id)
            images = generator.standard_normal((batch, *shape)).astype("f")
            return md.constant(images), md.constant(generator.integers(0, 10, batch))

        self.images, self.labels = self.strategy.run(batch_of_a_replica)

    @property
    def size(self) -> int:
        return sum(v.size * v.dtype.itemsize for v in self.model.trainable_variables)

    def step(self) -> None:
        self.strategy.run(train_step, self.model, self.optimizer, self.images, self.labels)

    def compute(self) -> None:
        self.strategy.run(self._compute, self.images, self.labels)

    def _compute(self, images: md.Tensor, labels: md.Tensor) -> float:
        with md.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss = md.ops.reduce_mean(md.ops.softmax_cross_entropy(logits, labels))
        tape.gradient(loss, self.model.trainable_variables)
        return float(loss)


def growth(arguments: argparse.Namespace) -> None:
    """Compare each policy's step with compute alone, for 1 to 16 devices."""
    counts = [1, 2, 3, 4, 6, 8, 12, 16]
    more: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    allowed: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for n in counts:
        # Compute alone is the same for all: with own copies, which cost nothing to read.
        alone = Job("independent", n, "mlp", (28, 28, 1), 8)
        jobs = {policy: Job(policy, n, "mlp", (28, 28, 1), 8) for policy in POLICIES}
        extra: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        speeds = []
        for round_ in range(GROWTH_ROUNDS + 1):
            speeds.append(copy_speed())
            for policy, job in jobs.items():
                base = median_time(alone.compute, 5)
                cost = median_time(job.step, 5) - base
                if round_:  # the first one warms up
                    extra[policy].append(cost * 1e3)
        for policy in POLICIES:
            limit = 1.25 * touched(policy, n, alone.size) / statistics.median(speeds) + n * 150e-6
            show(f"{policy}, {n} devices: more", extra[policy], "ms", f"allowed: {limit * 1e3:.2f}")
            more[policy].append(statistics.median(extra[policy]))
            allowed[policy].append(limit * 1e3)
        for job in (alone, *jobs.values()):
            job.strategy.close()
    if arguments.plot:
        plot(arguments.plot, counts, more, allowed)


def plot(
    path: str, counts: list[int], more: dict[str, list[float]], allowed: dict[str, list[float]]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for policy in POLICIES:
        (line,) = axes.plot(counts, more[policy], marker="o", markersize=4, label=policy)
        axes.plot(counts, allowed[policy], linestyle=":", linewidth=1, color=line.get_color())
    axes.set_xlabel("virtual devices, fixed batch each (dotted: what is allowed)")
    axes.set_ylabel("ms a step beyond computing")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


# --- staged beside unstaged ---------------------------------------------------------------------


def staged(_: argparse.Namespace) -> None:
    """Compare steps of parameter_server with and without staged variables, in turns."""
    for model, shape, batch in (("mlp", (28, 28, 1), 64), ("lenet", (28, 28, 1), 32)):
        pair = [
            Job(policy, 2, model, shape, batch)
            for policy in ("parameter_server", "parameter_server+staged_vars")
        ]
        ratios = []
        for round_ in range(3 * ROUNDS + 1):
            plain, late = (median_time(job.step, 10) for job in pair)
            if round_:
                ratios.append(100 * plain / late)
        show(f"{model}, 2 devices: staged over unstaged rate", ratios, "%", "target: 97")
        for job in pair:
            job.strategy.close()


# --- threads beside processes -------------------------------------------------------------------


def processes(arguments: argparse.Namespace) -> None:
    """Compare two replicas in one process with two processes of one replica, which never meet."""
    together = ("replicated", "independent")
    for model, batch in (("mlp", 64), ("lenet", 64)):
        separate: list[float] = []
        rates: dict[str, list[float]] = {policy: [] for policy in together}
        for _ in range(ROUNDS):
            separate.append(sum(_workers([(1, "independent", model, batch)] * 2)))
            for policy in together:
                rates[policy] += _workers([(2, policy, model, batch)])
        show(f"{model}, two processes of one replica", separate, "images/s")
        for policy in together:
            show(f"{model}, {policy}, two replicas in one process", rates[policy], "images/s")
            pairs = zip(rates[policy], separate, strict=True)
            show("  ratio", [100 * own / apart for own, apart in pairs], "%", "target: 95")


def _workers(jobs: Sequence[tuple[int, str, str, int]]) -> list[float]:
    """Run jobs, each in a process of its own, at the same time; return images/s of each."""
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "worker", *map(str, job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    ]
    for worker in running:  # all are warm before any is measured
        assert worker.stdout is not None
        worker.stdout.readline()
    for worker in running:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return [float(worker.communicate()[0]) for worker in running]


def worker(n: int, policy: str, model: str, batch: int) -> None:
    """Train for two seconds when told to. Of two processes each has half of the cores."""
    threads.divide(threads.allowed(), [threads.allowed()] * (2 // n))
    job = Job(policy, n, model, (28, 28, 1), batch)
    for _ in range(10):
        job.step()
    print("warm", flush=True)
    sys.stdin.readline()
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < 2:
        job.step()
        steps += 1
    print(n * batch * steps / (time.perf_counter() - started))


MEASUREMENTS = {"growth": growth, "staged": staged, "processes": processes}


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=[*MEASUREMENTS], help=", ".join(MEASUREMENTS))
    parser.add_argument("--plot", metavar="FILE", help="draw growth into this file (matplotlib)")
    arguments = parser.parse_args()
    for name in arguments.what:
        if name not in MEASUREMENTS:
            parser.error(f"there is no measurement {name!r}; choose from {', '.join(MEASUREMENTS)}")
    for name in arguments.what:
        MEASUREMENTS[name](arguments)


if __name__ == "__main__":
    main()
