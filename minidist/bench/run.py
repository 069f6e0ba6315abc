"""One run of the benchmark: header, model, then a training or the evaluation of a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from minidist import context, data
from minidist.bench import making, report
from minidist.bench.counts import Counts
from minidist.bench.crew import Crew
from minidist.bench.evaluation import Evaluation, due
from minidist.bench.figures import Figures
from minidist.bench.flags import Flags
from minidist.bench.loop import Loop
from minidist.bench.saving import Keeper, Summaries
from minidist.bench.watch import Watch
from minidist.errors import UsageError
from minidist.instruments.nvtx import nvtx
from minidist.nn import Layer
from minidist.strategy import Strategy
from minidist.train import weights_checksums
from minidist.train_dir import TrainDir


def run(flags: Flags, dataset: data.Dataset, crew: Crew) -> dict[str, Any]:
    """Do the run, print it, and return what its JSON holds.

    All workers of the crew do it together, and return the same.
    Raises UsageError for flags that do not go together with the data or the policy, DataError for
    checkpoints that are missing or damaged, NonFiniteError for a loss that is not a number.
    """
    context.seed(flags.tf_random_seed)
    with ExitStack() as closing:
        if flags.nvtx:
            closing.enter_context(nvtx())
        strategy = closing.enter_context(making.strategy(flags, crew))
        folder = None
        if flags.train_dir is not None:
            keep = flags.max_ckpts_to_keep or None
            folder = TrainDir(
                flags.train_dir, keep=keep, write=not flags.eval, cluster=crew.cluster
            )
            closing.enter_context(folder)
        if flags.eval:
            assert folder is not None  # by Flags
            return _evaluate(flags, dataset, crew, strategy, folder)
        return _train(flags, dataset, crew, strategy, folder, closing)


def _train(
    flags: Flags,
    dataset: data.Dataset,
    crew: Crew,
    strategy: Strategy,
    folder: TrainDir | None,
    closing: ExitStack,
) -> dict[str, Any]:
    saved = None if folder is None else folder.newest()
    workers = len(crew.names)
    batches = making.training_batches(flags, workers, dataset.train, start=saved or 0)
    total = flags.steps(batches.batches_per_epoch)
    for fault in flags.inject or ():
        if fault.kind == "fail" and fault.amount > total:
            raise UsageError(f"--inject={fault} is never reached: there are {total} steps")
    end = flags.num_warmup_batches + total
    where = "" if saved is None else f"Resumes at:  step {saved} of {end}, the warm-up counted"
    epochs = total / batches.batches_per_epoch
    _print_header(flags, dataset, crew, strategy, total, epochs, where)
    print("Generating training model")
    with strategy.scope():
        model = making.model(flags, dataset)
    rate = flags.learning_rate(batches.batches_per_epoch, batches.batch_size)
    optimizer = making.optimizer(flags, rate(0))
    keeper = summaries = None
    if folder is not None:
        keeper = Keeper(flags, crew, folder, model, optimizer, end)
        if saved is not None:
            keeper.resume()
        if flags.save_summaries_steps:
            summaries = closing.enter_context(Summaries(flags, crew, folder, model, saved or 0))
    watch = Watch(flags, crew, Counts(flags, strategy, model), strategy)
    figures = Figures(crew, in_step=flags.cross_replica_sync)
    loop = Loop(
        flags,
        strategy,
        model,
        optimizer,
        rate,
        dataset.unit,
        feed=making.feed(flags, strategy, batches),
        evaluate=Evaluation(flags, workers, strategy, model, dataset.test),
        evaluation_is_due=due(flags, batches.batches_per_epoch),
        watch=watch,
        figures=figures,
        keeper=keeper,
        summaries=summaries,
        done=saved or 0,
    )
    loop.warm_up()
    if keeper is None or not keeper.has_stopped:
        crew.exchange("begin to measure", None)
        loop.measure(total)
    seen = watch.found()
    if figures.steps:
        print("\n".join(seen.lines()))
    accuracy = None
    if loop.evaluations or not (dataset.synthetic or flags.forward_only):
        accuracy = loop.accuracy()
        print(report.accuracy_line(accuracy))
    return report.document(
        **_about(flags, crew, strategy, model, dataset),
        steps=figures.steps,
        speed=loop.speed if figures.steps else None,
        total_images_per_sec=loop.total_images_per_sec if figures.steps else None,
        accuracy=accuracy,
        evaluations=loop.evaluations,
        watched=seen.json(),
        resumed_at=saved,
        global_step=loop.done,
    )


def _evaluate(
    flags: Flags, dataset: data.Dataset, crew: Crew, strategy: Strategy, folder: TrainDir
) -> dict[str, Any]:
    with strategy.scope():
        model = making.model(flags, dataset)
    step = folder.load(model).step
    evaluate = Evaluation(flags, len(crew.names), strategy, model, dataset.test)
    where = f"Checkpoint:  step {step}"
    _print_header(flags, dataset, crew, strategy, evaluate.num_batches, evaluate.num_epochs, where)
    accuracy, images_per_sec = evaluate.with_rows()
    print(report.accuracy_line(accuracy))
    print("\n".join(report.closing(images_per_sec, dataset.unit)))
    return report.document(
        **_about(flags, crew, strategy, model, dataset),
        steps=[],
        speed=None,
        total_images_per_sec=images_per_sec,
        accuracy=accuracy,
        evaluations=[],
        watched={},
        resumed_at=None,
        global_step=step,
    )


def _print_header(
    flags: Flags,
    dataset: data.Dataset,
    crew: Crew,
    strategy: Strategy,
    num_batches: int,
    num_epochs: float,
    where: str,
) -> None:
    devices = _devices(crew, strategy)
    run = num_batches, num_epochs, where, crew.cluster
    print("\n".join(report.header(flags, dataset, devices, *run)), flush=True)


def _devices(crew: Crew, strategy: Strategy) -> list[str]:
    """Return the names of all replicas' devices; of several workers with the workers' names."""
    of_workers = crew.exchange("name devices", [device.short for device in strategy.devices])
    if len(of_workers) == 1:
        return list(of_workers[0])
    named = zip(crew.names, of_workers, strict=True)
    return [f"{name}/{device}" for name, devices in named for device in devices]


def _about(
    flags: Flags, crew: Crew, strategy: Strategy, model: Layer, dataset: data.Dataset
) -> dict[str, Any]:
    of_workers = crew.exchange("tell of records that were skipped", dataset.skipped)
    skipped = len({(part, n) for one in of_workers for part in one for n in one[part]})
    if flags.skip_bad_records:
        print(report.skipped_line(skipped))
    return {
        "skipped_records": skipped,
        "flags": flags,
        "devices": _devices(crew, strategy),
        "unit": dataset.unit,
        "peak_memory_bytes": max(crew.exchange("tell of memory", report.peak_memory_bytes())),
        "weights_checksum": weights_checksums(strategy, model),
        "parameters": sum(variable.size for variable in model.trainable_variables),
    }
