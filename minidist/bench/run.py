"""One run of the benchmark: header, model, then a training or the evaluation of a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from minidist import context, data
from minidist.bench import making, report
from minidist.bench.counts import Counts
from minidist.bench.evaluation import Evaluation, due
from minidist.bench.flags import Flags
from minidist.bench.loop import Loop
from minidist.bench.saving import Keeper, Summaries
from minidist.bench.watch import Watch
from minidist.errors import UsageError
from minidist.nn import Layer
from minidist.strategy import Strategy
from minidist.train import weights_checksums
from minidist.train_dir import TrainDir


def run(flags: Flags, dataset: data.Dataset) -> dict[str, Any]:
    """Do the run, print it, and return what its JSON holds.

    Raises UsageError for flags that do not go together with the data or the policy, DataError for
    checkpoints that are missing or damaged, NonFiniteError for a loss that is not a number.
    """
    context.seed(flags.tf_random_seed)
    with ExitStack() as closing:
        strategy = closing.enter_context(making.strategy(flags))
        folder = None
        if flags.train_dir is not None:
            keep = flags.max_ckpts_to_keep or None
            folder = TrainDir(flags.train_dir, keep=keep, write=not flags.eval)
            closing.enter_context(folder)
        if flags.eval:
            assert folder is not None  # by Flags
            return _evaluate(flags, dataset, strategy, folder)
        return _train(flags, dataset, strategy, folder, closing)


def _train(
    flags: Flags,
    dataset: data.Dataset,
    strategy: Strategy,
    folder: TrainDir | None,
    closing: ExitStack,
) -> dict[str, Any]:
    saved = None if folder is None else folder.newest()
    batches = making.training_batches(flags, dataset.train, start=saved or 0)
    total = flags.steps(batches.batches_per_epoch)
    for fault in flags.inject or ():
        if fault.kind == "fail" and fault.amount > total:
            raise UsageError(f"--inject={fault} is never reached: there are {total} steps")
    end = flags.num_warmup_batches + total
    where = "" if saved is None else f"Resumes at:  step {saved} of {end}, the warm-up counted"
    epochs = total / batches.batches_per_epoch
    _print_header(flags, dataset, strategy, total, epochs, where)
    print("Generating training model")
    with strategy.scope():
        model = making.model(flags, dataset)
    rate = flags.learning_rate(batches.batches_per_epoch)
    optimizer = making.optimizer(flags, rate(0))
    keeper = summaries = None
    if folder is not None:
        keeper = Keeper(flags, folder, model, optimizer, end)
        if saved is not None:
            keeper.resume()
        if flags.save_summaries_steps:
            summaries = closing.enter_context(Summaries(flags, folder, model, saved or 0))
    watch = Watch(flags, Counts(flags, strategy, model))
    loop = Loop(
        flags,
        strategy,
        model,
        optimizer,
        rate,
        feed=iter(strategy.distribute_dataset(batches)),
        evaluate=Evaluation(flags, strategy, model, dataset.test),
        evaluation_is_due=due(flags, batches.batches_per_epoch),
        watch=watch,
        keeper=keeper,
        summaries=summaries,
        done=saved or 0,
    )
    loop.warm_up()
    if keeper is None or not keeper.has_stopped:
        loop.measure(total)
        print("\n".join(watch.lines()))
    accuracy = None
    if loop.evaluations or not (dataset.synthetic or flags.forward_only):
        accuracy = loop.accuracy()
        print(report.accuracy_line(accuracy))
    return report.document(
        **_about(flags, strategy, model),
        steps=loop.steps,
        speed=loop.speed if loop.steps else None,
        total_images_per_sec=loop.total_images_per_sec if loop.steps else None,
        accuracy=accuracy,
        evaluations=loop.evaluations,
        watched=watch.json(),
        resumed_at=saved,
        global_step=loop.done,
    )


def _evaluate(
    flags: Flags, dataset: data.Dataset, strategy: Strategy, folder: TrainDir
) -> dict[str, Any]:
    with strategy.scope():
        model = making.model(flags, dataset)
    step = folder.load(model).step
    evaluate = Evaluation(flags, strategy, model, dataset.test)
    where = f"Checkpoint:  step {step}"
    _print_header(flags, dataset, strategy, evaluate.num_batches, evaluate.num_epochs, where)
    accuracy, images_per_sec = evaluate.with_rows()
    print(report.accuracy_line(accuracy))
    print("\n".join(report.closing(images_per_sec)))
    return report.document(
        **_about(flags, strategy, model),
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
    strategy: Strategy,
    num_batches: int,
    num_epochs: float,
    where: str,
) -> None:
    lines = report.header(flags, dataset, _devices(strategy), num_batches, num_epochs, where)
    print("\n".join(lines), flush=True)


def _devices(strategy: Strategy) -> list[str]:
    return [device.short for device in strategy.devices]


def _about(flags: Flags, strategy: Strategy, model: Layer) -> dict[str, Any]:
    return {
        "flags": flags,
        "devices": _devices(strategy),
        "weights_checksum": weights_checksums(strategy, model),
        "parameters": sum(variable.size for variable in model.trainable_variables),
    }
