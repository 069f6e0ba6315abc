"""The command line of the benchmark: every flag, every spelling, every refusal."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.bench.flags import LEARNING_RATES, Flags, parse
from minidist.bench.schedule import Schedule
from minidist.errors import UsageError

BOOLEANS = ["forward_only", "print_training_accuracy", "concurrent", "nesterov"]


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
        ("data_format", "NCHW", "NCHW"),
        ("num_batches", "1", 1),
        ("num_epochs", "0.5", 0.5),
        ("num_warmup_batches", "0", 0),
        ("display_every", "1", 1),
        ("variable_update", "parameter_server", "parameter_server"),
        ("variable_update", "independent", "independent"),
        ("local_parameter_device", "device", "device"),
        ("local_parameter_device", "gpu", "gpu"),
        ("gradient_scale", "original", "original"),
        ("optimizer", "rmsprop", "rmsprop"),
        ("init_learning_rate", "1e-3", 0.001),
        ("piecewise_learning_rate_schedule", "0.3;10;0.2", Schedule((0.3, 0.2), (10.0,))),
        ("momentum", "0", 0.0),
        ("rmsprop_decay", "0.5", 0.5),
        ("rmsprop_momentum", "0.5", 0.5),
        ("rmsprop_epsilon", "0.5", 0.5),
        ("adam_beta1", "0.5", 0.5),
        ("adam_beta2", "0.5", 0.5),
        ("adam_epsilon", "0.5", 0.5),
        ("weight_decay", "0", 0.0),
        ("loss_type_to_report", "base_loss", "base_loss"),
        ("tf_random_seed", "18446744073709551615", 2**64 - 1),
    ],
)
def test_values_are_given_with_or_without_an_equals_sign(
    name: str, text: str, value: object
) -> None:
    for arguments in ([f"--{name}={text}"], [f"--{name}", text]):
        got = getattr(parse(arguments), name)
        assert got == value
        assert type(got) is type(value)


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans_have_four_spellings(name: str) -> None:
    for argument in (f"--{name}", f"--{name}=true", f"--{name}=True"):
        assert getattr(parse([argument]), name) is True
    for argument in (f"--no{name}", f"--{name}=false"):
        assert getattr(parse([argument]), name) is False
    assert getattr(parse([f"--{name}", f"--no{name}"]), name) is False
    assert getattr(parse([f"--no{name}", f"--{name}", "--batch_size=1"]), name) is True


def test_every_boolean_is_tested() -> None:
    assert [item.name for item in fields(Flags) if isinstance(item.default, bool)] == BOOLEANS


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
        ("--model=resnet", "trivial, mlp or lenet"),
        ("--model=", "trivial, mlp or lenet"),
        ("--data_name=minst", "digits, mnist, cifar10, imagenet or synthetic"),
        ("--data_dir=", "a folder"),
        ("--device=gpu", "cpu"),
        ("--data_format=nhwc", "NHWC or NCHW"),
        ("--variable_update=horovod", "independent, parameter_server or replicated"),
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


def test_contradictions_are_errors() -> None:
    with pytest.raises(UsageError, match="--num_batches and --num_epochs contradict"):
        parse(["--num_batches=3", "--num_epochs=2"])
    with pytest.raises(UsageError, match=r"--piecewise.* and --init_learning_rate contradict"):
        parse(["--piecewise_learning_rate_schedule=0.1", "--init_learning_rate=0.1"])


def test_num_batches_replaces_the_default_number_of_epochs() -> None:
    flags = parse(["--num_batches=3"])
    assert (flags.num_batches, flags.num_epochs) == (3, None)


def test_the_learning_rate_is_given_scheduled_or_the_optimizers() -> None:
    assert parse(["--init_learning_rate=0.5", "--optimizer=adam"]).learning_rate(7.5) == 0.5
    for optimizer, rate in LEARNING_RATES.items():
        assert parse([f"--optimizer={optimizer}"]).learning_rate(0) == rate
    flags = parse(["--piecewise_learning_rate_schedule=0.3;10;0.2;25;0.02"])
    assert flags.init_learning_rate is None
    rates = [flags.learning_rate(epoch) for epoch in (0, 9.99, 10, 24.99, 25, 1e9)]
    assert rates == [0.3, 0.3, 0.2, 0.2, 0.02, 0.02]


@given(st.lists(st.floats(0, 1e6), unique=True).map(sorted), st.data())
def test_a_schedule_survives_its_text(epochs: list[float], data: st.DataObject) -> None:
    count = len(epochs) + 1
    rates = data.draw(st.lists(st.floats(0, 10), min_size=count, max_size=count))
    schedule = Schedule(tuple(rates), tuple(epochs))
    assert Schedule.parse(str(schedule)) == schedule


def test_the_configuration_is_plain_and_complete() -> None:
    flags = parse(["--piecewise_learning_rate_schedule=0.3;10;0.02", "--num_gpus=3"])
    config = flags.config()
    assert list(config) == [item.name for item in fields(Flags)]
    assert config["piecewise_learning_rate_schedule"] == "0.3;10;0.02"
    assert config["num_devices"] == 3
    assert all(isinstance(value, str | int | float | None) for value in config.values())


def test_help_names_every_flag_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.isascii()
    groups = ["Selection:", "Length:", "Mode:", "Distribution:", "Optimisation:", "Output:"]
    places = [text.index(f"\n{group}\n") for group in groups]
    assert places == sorted(places)
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
