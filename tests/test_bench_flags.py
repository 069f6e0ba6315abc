"""The command line of the benchmark: every flag, every spelling, every refusal."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from minidist.bench.flags import GROUPS, LEARNING_RATES, Flags
from minidist.bench.flags.contradictions import DURING_TRAINING
from minidist.bench.flags.parse import parse
from minidist.errors import UsageError
from minidist.models import MODELS
from minidist.optim.schedules import Piecewise
from minidist.variable_mgr import POLICIES, PolicyOptions

*MOST, LAST = MODELS
MODELS_ALLOWED = f"{', '.join(MOST)} or {LAST}"
BOOLEANS = [
    "forward_only",
    "eval",
    "print_training_accuracy",
    "distortions",
    "distort_color_in_yiq",
    "skip_bad_records",
    "datasets_repeat_cached_sample",
    "staged_vars",
    "caching",
    "hierarchical_copy",
    "overlap",
    "concurrent",
    "cross_replica_sync",
    "nesterov",
    "use_fp16",
    "use_bf16",
    "fp16_enable_auto_loss_scale",
    "nvtx",
    "profile",
]
# What some flags cannot do without.
COMPANIONS = {
    "eval": ["--train_dir=x"],
    "staged_vars": ["--variable_update=parameter_server"],
    "caching": ["--variable_update=parameter_server"],
    "cross_replica_sync": ["--variable_update=parameter_server"],
    "staleness_bound": ["--variable_update=parameter_server", "--nocross_replica_sync"],
    "task_index": ["--job_name=ps"],
    "ps_hosts": ["--worker_hosts=a:1"],
    "fp16_loss_scale": ["--use_fp16"],
    "fp16_enable_auto_loss_scale": ["--use_fp16"],
    "resnet_base_lr": ["--model=resnet50", "--data_name=imagenet"],
    "num_epochs_per_decay": ["--learning_rate_decay_factor=0.5"],
    "learning_rate_decay_factor": ["--num_epochs_per_decay=2"],
    "minimum_learning_rate": ["--num_epochs_per_decay=2", "--learning_rate_decay_factor=0.5"],
    "stop_at_top_1_accuracy": ["--eval_during_training_every_n_steps=2"],
    "save_model_steps": ["--train_dir=x"],
    "save_model_secs": ["--train_dir=x"],
    "save_summaries_steps": ["--train_dir=x"],
    "input_preprocessor": ["--data_name=imagenet", "--data_dir=x"],
    "resize_method": ["--data_name=imagenet", "--data_dir=x"],
    "distort_color_in_yiq": ["--data_name=imagenet", "--data_dir=x"],
    "skip_bad_records": ["--data_name=imagenet", "--data_dir=x"],
    "summary_verbosity": ["--train_dir=x", "--save_summaries_steps=5"],
}


def test_without_arguments_it_is_the_main_job() -> None:
    flags = parse([])
    assert flags == Flags()
    assert (flags.model, flags.data_name, flags.data_dir) == ("lenet", "digits", None)
    assert (flags.device, flags.num_devices, flags.variable_update) == ("cpu", 2, "replicated")
    assert flags.num_batches is None
    assert flags.num_epochs is not None
    with pytest.raises(FrozenInstanceError):
        flags.model = "mlp"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("model", "trivial", "trivial"),
        ("data_name", "imagenet", "imagenet"),
        ("data_dir", "somewhere", "somewhere"),
        ("batch_size", "7", 7),
        ("num_devices", "1", 1),
        ("device", "cpu", "cpu"),
        ("device", "cuda", "cuda"),
        ("device", "cuda:1", "cuda:1"),
        ("kernels", "gemm", "gemm"),
        ("data_format", "NCHW", "NCHW"),
        ("num_batches", "1", 1),
        ("num_epochs", "0.5", 0.5),
        ("num_warmup_batches", "0", 0),
        ("display_every", "1", 1),
        ("display_perf_ewma", "0.1", 0.1),
        ("input_preprocessor", "official_models_imagenet", "official_models_imagenet"),
        ("resize_method", "round_robin", "round_robin"),
        ("datasets_num_private_threads", "0", 0),
        ("datasets_prefetch_buffer_size", "1", 1),
        ("variable_update", "parameter_server", "parameter_server"),
        ("variable_update", "independent", "independent"),
        ("local_parameter_device", "device", "device"),
        ("local_parameter_device", "gpu", "gpu"),
        ("variable_update", "all", "all"),
        ("gradient_scale", "original", "original"),
        ("variable_consistency", "relaxed", "relaxed"),
        ("all_reduce_spec", "pscpu:2k:xring#2", "pscpu:2k:xring#2"),
        ("gradient_repacking", "4", 4),
        ("agg_small_grads_max_bytes", "1024", 1024),
        ("agg_small_grads_max_group", "5", 5),
        ("compact_gradient_transfer", "true", "float16"),
        ("compact_gradient_transfer", "false", False),
        ("compact_gradient_transfer", "bfloat16", "bfloat16"),
        ("bucket_cap_mb", "0.5", 0.5),
        ("optimizer", "rmsprop", "rmsprop"),
        ("init_learning_rate", "1e-3", 0.001),
        ("resnet_base_lr", "0.2", 0.2),
        ("piecewise_learning_rate_schedule", "0.3;10;0.2", Piecewise((0.3, 0.2), (10.0,))),
        ("momentum", "0", 0.0),
        ("rmsprop_decay", "0.5", 0.5),
        ("rmsprop_momentum", "0.5", 0.5),
        ("rmsprop_epsilon", "0.5", 0.5),
        ("adam_beta1", "0.5", 0.5),
        ("adam_beta2", "0.5", 0.5),
        ("adam_epsilon", "0.5", 0.5),
        ("weight_decay", "0", 0.0),
        ("num_epochs_per_decay", "2.5", 2.5),
        ("learning_rate_decay_factor", "0.5", 0.5),
        ("minimum_learning_rate", "0.001", 0.001),
        ("num_learning_rate_warmup_epochs", "0.5", 0.5),
        ("gradient_clip", "2", 2.0),
        ("gradient_clip_norm", "2", 2.0),
        ("gradient_accumulation_steps", "4", 4),
        ("label_smoothing", "0.1", 0.1),
        ("fp16_loss_scale", "64", 64.0),
        ("fp16_inc_loss_scale_every_n", "7", 7),
        ("eval_batch_size", "5", 5),
        ("num_eval_batches", "5", 5),
        ("num_eval_epochs", "0.5", 0.5),
        ("eval_during_training_every_n_steps", "5", 5),
        ("eval_during_training_every_n_epochs", "0.5", 0.5),
        ("eval_during_training_at_specified_steps", "9,1,5", (1, 5, 9)),
        ("eval_during_training_at_specified_epochs", "0.5,2", (0.5, 2.0)),
        ("stop_at_top_1_accuracy", "0.9", 0.9),
        ("train_dir", "somewhere", "somewhere"),
        ("save_model_steps", "10", 10),
        ("save_model_secs", "0.5", 0.5),
        ("max_ckpts_to_keep", "0", 0),
        ("save_summaries_steps", "5", 5),
        ("summary_verbosity", "3", 3),
        ("loss_type_to_report", "base_loss", "base_loss"),
        ("tf_random_seed", "18446744073709551615", 2**64 - 1),
        ("num_ps", "0", 0),
        ("job_name", "ps", "ps"),
        ("task_index", "0", 0),
        ("worker_hosts", "a:1,b:2", "a:1,b:2"),
        ("ps_hosts", "c:1", "c:1"),
        ("staleness_bound", "3", 3),
    ],
)
def test_values_are_given_with_or_without_an_equals_sign(
    name: str, text: str, value: object
) -> None:
    for arguments in ([f"--{name}={text}"], [f"--{name}", text]):
        got = getattr(parse([*arguments, *COMPANIONS.get(name, [])]), name)
        assert got == value
        assert type(got) is type(value)


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans_have_four_spellings(name: str) -> None:
    def got(*arguments: str) -> object:
        return getattr(parse([*arguments, *COMPANIONS.get(name, [])]), name)

    for argument in (f"--{name}", f"--{name}=true", f"--{name}=True"):
        assert got(argument) is True
    for argument in (f"--no{name}", f"--{name}=false"):
        assert got(argument) is False
    assert got(f"--{name}", f"--no{name}") is False
    assert got(f"--no{name}", f"--{name}", "--batch_size=1") is True


def test_every_boolean_is_tested() -> None:
    booleans = [item.name for item in fields(Flags) if item.type in ("bool", "bool | None")]
    assert booleans == BOOLEANS


def test_compact_transfer_is_a_switch_that_also_takes_a_type() -> None:
    name = "compact_gradient_transfer"
    assert [getattr(parse([f"--{x}{name}"]), name) for x in ("", "no")] == ["float16", False]


def test_every_option_of_a_policy_is_a_flag_with_the_same_default() -> None:
    for item in fields(PolicyOptions):
        assert getattr(parse([]), item.name) == item.default, item.name
    options = parse(["--gradient_repacking=3", "--overlap", "--all_reduce_spec=rechd"])
    assert options.policy_options() == PolicyOptions(
        gradient_repacking=3, overlap=True, all_reduce_spec="rechd"
    )


@pytest.mark.parametrize(
    ("alias", "name"), [("num_gpus", "num_devices"), ("seed", "tf_random_seed")]
)
def test_two_flags_have_a_second_name(alias: str, name: str) -> None:
    assert getattr(parse([f"--{alias}=3"]), name) == 3
    assert getattr(parse([f"--{alias}=3", f"--{name}=3"]), name) == 3
    with pytest.raises(UsageError, match=rf"--{name} and --{alias} are the same.*given 4 and 3"):
        parse([f"--{alias}=3", f"--{name}=4"])


def test_the_last_of_equal_flags_counts() -> None:
    assert parse(["--batch_size=3", "--batch_size=4"]).batch_size == 4


def test_unknown_flags_are_answered_with_a_guess_and_all_names() -> None:
    with pytest.raises(UsageError, match=r"^--batchsize is not .* mean --batch_size") as error:
        parse(["--batchsize=3"])
    for item in fields(Flags):
        assert f"--{item.name}" in str(error.value)
    assert "--num_gpus" in str(error.value)
    with pytest.raises(UsageError, match=r"^--zzzz is not a flag\. Flags are --model"):
        parse(["--zzzz", "1"])
    with pytest.raises(UsageError, match=r"^--num_batch is not a flag"):  # no abbreviations
        parse(["--num_batch=3"])
    for argument in ("lenet", "-n"):
        with pytest.raises(UsageError, match="is not a flag: flags begin with --"):
            parse([argument])


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        ("--model=resnet", MODELS_ALLOWED),
        ("--model=", MODELS_ALLOWED),
        ("--data_name=minst", "digits, mnist, cifar10, imagenet, folder, synthetic or text"),
        ("--data_dir=", "a folder"),
        ("--device=gpu", "cpu, cuda, or one GPU as cuda:0"),
        ("--device=cpu:1", "cpu, cuda, or one GPU as cuda:0"),
        ("--data_format=nhwc", "NHWC or NCHW"),
        ("--variable_update=horovod", f"{', '.join(POLICIES)} or all"),
        ("--local_parameter_device=tpu", "cpu, device or gpu"),
        ("--gradient_scale=sum", "mean or original"),
        ("--optimizer=adagrad", "sgd, momentum, rmsprop or adam"),
        ("--loss_type_to_report=loss", "total_loss or base_loss"),
        ("--num_devices=0", "a whole number from 1 to 1024"),
        ("--num_devices=-1", "a whole number from 1 to 1024"),
        ("--num_devices=1025", "a whole number from 1 to 1024"),
        ("--num_gpus=0", "a whole number from 1 to 1024"),
        ("--batch_size=0", "a whole number from 1 to 1000000000"),
        ("--batch_size=1.5", "a whole number from 1 to 1000000000"),
        ("--batch_size=many", "a whole number from 1 to 1000000000"),
        ("--num_batches=0", "a whole number from 1 to 1000000000"),
        ("--num_epochs=0", "a number above 0, at most a million"),
        ("--num_epochs=1e300", "a number above 0, at most a million"),
        ("--num_epochs=inf", "a number above 0, at most a million"),
        ("--num_warmup_batches=-1", "a whole number from 0 to 1000000000"),
        ("--display_every=0", "a whole number from 1 to 1000000000"),
        ("--init_learning_rate=-0.1", "a number of at least 0"),
        ("--init_learning_rate=nan", "a number of at least 0"),
        ("--weight_decay=-1", "a number of at least 0"),
        ("--momentum=1", "a number from 0 to just below 1"),
        ("--adam_beta1=-0.1", "a number from 0 to just below 1"),
        ("--adam_epsilon=0", "a number above 0"),
        ("--seed=-1", "a whole number from 0 to 18446744073709551615"),
        ("--seed=18446744073709551616", "a whole number from 0 to 18446744073709551615"),
        ("--nesterov=maybe", "true or false"),
        ("--compact_gradient_transfer=int8", "float16, bfloat16, true (float16) or false"),
        ("--bucket_cap_mb=0", "a number above 0"),
        ("--display_perf_ewma=0", "a number above 0, at most 1"),
        ("--gradient_clip=0", "a number above 0"),
        ("--gradient_accumulation_steps=0", "a whole number from 1 to 1000000000"),
        ("--summary_verbosity=4", "a whole number from 0 to 3"),
        ("--stop_at_top_1_accuracy=90", "a number above 0, at most 1"),
        (
            "--eval_during_training_at_specified_steps=1,,2",
            "whole numbers from 1 with commas between them",
        ),
        (
            "--eval_during_training_at_specified_epochs=0",
            "numbers above 0 with commas between them",
        ),
        ("--json=", "a file name in a folder that exists"),
        ("--json=/no/such/folder/results.json", "a file name in a folder that exists"),
    ],
)
def test_values_that_are_not_allowed_are_answered_with_those_that_are(
    argument: str, allowed: str
) -> None:
    with pytest.raises(UsageError) as error:
        parse([argument])
    assert str(error.value) == f"{argument} is not {allowed}"


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UsageError, match="--batch_size: expected one argument"):
        parse(["--batch_size"])


@pytest.mark.parametrize(
    "text", ["", ";", "0.1;2", "0.1;two;0.2", "-1", "0.1;5;0.2;5;0.3", "0.1;5;0.2;4;0.3", "nan"]
)
def test_malformed_schedules_are_answered_with_the_form(text: str) -> None:
    with pytest.raises(UsageError, match=r"_schedule: '.*' is not .*0\.02;10;0\.01;15;0\.005"):
        parse([f"--piecewise_learning_rate_schedule={text}"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--num_batches=3 --num_epochs=2", "--num_batches and --num_epochs contradict"),
        ("--num_eval_batches=3 --num_eval_epochs=2", "--num_eval_batches and .* contradict"),
        ("--forward_only --eval --train_dir=x", "--forward_only and --eval contradict"),
        ("--forward_only --train_dir=x", "--forward_only and --train_dir contradict"),
        ("--eval", "--eval needs --train_dir"),
        ("--save_model_secs=3 --save_model_steps=3 --train_dir=x", "--save_model_secs and .*steps"),
        ("--save_model_secs=3", "--save_model_secs needs --train_dir"),
        ("--save_model_steps=3", "--save_model_steps needs --train_dir"),
        ("--save_summaries_steps=3", "--save_summaries_steps needs --train_dir"),
        ("--summary_verbosity=3", "--summary_verbosity=3 needs --save_summaries_steps"),
        *(
            (f"--{during}=1 --{other}", f"--{during} and --{other.split()[0]} contradict")
            for during in DURING_TRAINING
            for other in (
                "eval --train_dir=x",
                "forward_only",
                "staged_vars --variable_update=parameter_server",
            )
        ),
        (f"--{DURING_TRAINING[0]}=1 --{DURING_TRAINING[3]}=1", "contradict"),
        ("--stop_at_top_1_accuracy=0.9", "--stop_at_top_1_accuracy needs evaluations during"),
        ("--piecewise_learning_rate_schedule=1 --init_learning_rate=1", "contradict"),
        ("--piecewise_learning_rate_schedule=1 --init_learning_rate=0", "contradict"),
        (
            "--piecewise_learning_rate_schedule=1 --num_epochs_per_decay=1"
            " --learning_rate_decay_factor=1",
            "contradict",
        ),
        ("--num_epochs_per_decay=2", "needs --learning_rate_decay_factor"),
        ("--learning_rate_decay_factor=0.5", "needs --num_epochs_per_decay"),
        ("--minimum_learning_rate=0.5", "needs --num_epochs_per_decay"),
        ("--use_fp16 --use_bf16", "--use_fp16 and --use_bf16 contradict"),
        ("--use_bf16 --fp16_loss_scale=3", "--fp16_loss_scale needs --use_fp16"),
        ("--fp16_enable_auto_loss_scale", "--fp16_enable_auto_loss_scale needs --use_fp16"),
        ("--gradient_clip=1 --gradient_clip_norm=1", "contradict"),
        ("--staged_vars", "--staged_vars=True is for --variable_update=parameter_server"),
        ("--caching", "--caching=True is for --variable_update=parameter_server"),
        (
            "--variable_consistency=relaxed --variable_update=independent",
            "--variable_consistency=relaxed is for --variable_update=replicated",
        ),
        ("--variable_update=parameter_server --staged_vars --caching", "contradict"),
        ("--hierarchical_copy --num_devices=1", "hierarchical_copy copies between devices"),
        ("--hierarchical_copy --all_reduce_spec=xring", "two ways to sum"),
        ("--all_reduce_spec=nccl", "sums on GPUs, but --device is cpu: give --device=cuda"),
        ("--all_reduce_spec=butterfly", "no algorithm is called 'butterfly'"),
        ("--all_reduce_spec=xring:2k", "odd number"),
        ("--variable_update=all --eval --train_dir=x", "names several"),
        *(
            (f"--num_ps=1 --{other}", f"--num_ps and --{other.split('=')[0]} contradict")
            for other in ("job_name=ps", "worker_hosts=a:1", "ps_hosts=a:1")
        ),
        ("--task_index=1", "--task_index needs --job_name"),
        ("--ps_hosts=a:1", "--ps_hosts needs --worker_hosts"),
        ("--nocross_replica_sync", "is for --variable_update=parameter_server, not for replicated"),
        ("--staleness_bound=1", "--staleness_bound=1 is for --variable_update=parameter_server"),
        (
            "--staleness_bound=1 --variable_update=parameter_server",
            "staleness_bound=1 is for workers that do not take their steps together",
        ),
        *(
            (
                f"--{name}=1 --nocross_replica_sync --variable_update=parameter_server"
                " --train_dir=x",
                f"--{name} needs workers that are in step",
            )
            for name in (*DURING_TRAINING, "save_model_secs")
        ),
    ],
)
def test_contradictions_are_errors(arguments: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse(arguments.split())


def test_under_all_policies_their_own_flags_are_no_contradiction() -> None:
    flags = parse(["--variable_update=all", "--caching", "--variable_consistency=relaxed"])
    assert (flags.caching, flags.variable_consistency) == (True, "relaxed")


def test_what_is_switched_off_is_no_contradiction() -> None:
    parse(
        [
            *("--summary_verbosity=0", "--save_model_secs=0", "--save_summaries_steps=0"),
            *("--noeval", "--nouse_fp16", "--fp16_enable_auto_loss_scale=false"),
            *("--nostaged_vars", "--variable_consistency=strong", "--nohierarchical_copy"),
            *("--num_devices=1", "--compact_gradient_transfer=false"),
        ]
    )


def test_what_follows_from_other_flags_is_filled_in() -> None:
    flags = parse(["--batch_size=7"])
    assert (flags.eval_batch_size, flags.fp16_loss_scale, flags.summary_verbosity) == (7, None, 0)
    assert parse(["--use_fp16"]).fp16_loss_scale == 128
    assert parse(["--train_dir=x", "--save_summaries_steps=5"]).summary_verbosity == 1
    names = [parse(arguments).activations for arguments in ([], ["--use_fp16"], ["--use_bf16"])]
    assert names == [None, "float16", "bfloat16"]


def test_num_batches_replaces_the_default_number_of_epochs() -> None:
    flags = parse(["--num_batches=3"])
    assert (flags.num_batches, flags.num_epochs) == (3, None)


def test_the_learning_rate_is_given_scheduled_or_the_optimizers() -> None:
    assert parse(["--init_learning_rate=0.5", "--optimizer=adam"]).learning_rate(10, 64)(75) == 0.5
    for optimizer, rate in LEARNING_RATES.items():
        assert parse([f"--optimizer={optimizer}"]).learning_rate(10, 64)(0) == rate
    flags = parse(["--piecewise_learning_rate_schedule=0.3;10;0.2;25;0.02"])
    assert flags.init_learning_rate is None
    rates = list(map(flags.learning_rate(10, 64), (0, 99, 100, 249, 250, 10**9)))
    assert rates == [0.3, 0.3, 0.2, 0.2, 0.02, 0.02]


def test_the_learning_rate_decays_and_warms_up() -> None:
    decay = ["--num_epochs_per_decay=0.3", "--learning_rate_decay_factor=0.5"]
    rate = parse(["--init_learning_rate=0.8", *decay]).learning_rate(10, 64)
    assert list(map(rate, (0, 2, 3, 5, 6, 9))) == [0.8, 0.8, 0.4, 0.4, 0.2, 0.1]
    floored = parse(["--init_learning_rate=0.8", *decay, "--minimum_learning_rate=0.3"])
    assert list(map(floored.learning_rate(10, 64), (3, 6, 9))) == [0.4, 0.3, 0.3]
    warm = parse(["--init_learning_rate=0.8", *decay, "--num_learning_rate_warmup_epochs=0.4"])
    assert list(map(warm.learning_rate(10, 64), (0, 1, 2, 3, 4))) == pytest.approx(
        [0, 0.2, 0.4, 0.6, 0.4]
    )
    flags = ["--piecewise_learning_rate_schedule=0.4;2;0.1", "--num_learning_rate_warmup_epochs=1"]
    assert list(map(parse(flags).learning_rate(4, 64), (0, 1, 3, 4, 8))) == pytest.approx(
        [0, 0.1, 0.3, 0.4, 0.1]
    )


def test_the_configuration_is_plain_and_complete() -> None:
    flags = parse(
        [
            "--piecewise_learning_rate_schedule=0.3;10;0.02",
            "--num_gpus=3",
            "--eval_during_training_at_specified_epochs=0.5,2",
        ]
    )
    config = flags.config()
    assert list(config) == [item.name for item in fields(Flags)]
    assert config["piecewise_learning_rate_schedule"] == "0.3;10;0.02"
    assert config["num_devices"] == 3
    assert config["eval_during_training_at_specified_epochs"] == "0.5,2.0"
    assert all(isinstance(value, str | int | float | None) for value in config.values())


def test_help_names_every_flag_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.isascii()
    places = [text.index(f"\n{group.__name__}:\n") for group in GROUPS]
    assert places == sorted(places)
    assert sum(len(fields(group)) for group in GROUPS) == len(fields(Flags))
    for item in fields(Flags):
        assert f"\n  --{item.name} " in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("minidist 0.")


def test_the_json_file_may_exist_but_not_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert parse([f"--json={file}"]).json == str(file)
    file.touch()
    assert parse([f"--json={file}"]).json == str(file)
    with pytest.raises(UsageError, match="is not a file name in a folder that exists"):
        parse([f"--json={tmp_path}"])
