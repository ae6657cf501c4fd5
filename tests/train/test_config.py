"""The schema: sources of values, refusals by name, digests, and that no field is without effect on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo_model
import plain_models
import pytest

from aprfmt.cli.main import run as apr
from aprfmt.errors import NotFoundError, UsageError
from aprtrain.config import (
    ASSUMED_WIDTH,
    DEFAULTS,
    Config,
    changed_fields,
    command_fields,
    resolve,
    schema,
    usual_lr,
    usual_values,
    what_fields,
)
from aprtrain.config_sources import build
from aprtrain.optim.rules import learning_rate

BASE: dict[str, Any] = {"teacher": "t", "student": "s", "data": "d", "output": "o", "steps": 200}


def made(file: Path | None = None, environment: dict[str, str] | None = None, **given: Any) -> Config:
    return build("distill", BASE | given, file, environment)[0]


def test_the_command_line_goes_before_the_environment_before_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('save-every = 7\nlog_every = 8\nlr = 1e-3\nloss = "jsd"\n')
    config = made(file, {"APR_DISTILL_LOG_EVERY": "9", "APR_DISTILL_CHECKPOINT_EVERY": "10"}, save_every=11)
    assert (config.save_every, config.log_every, config.lr, config.loss, config.clip) == (11, 9, 1e-3, "jsd", 1.0)


def test_no_on_the_command_line_switches_off_what_the_file_switches_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan, whose answer holds the configuration of a command with every switch."""
    monkeypatch.setattr("aprtrain.budget.require_llama", lambda: None)
    demo_model.build(tmp_path / "m.gguf")
    (tmp_path / "d").mkdir()
    for name in ("a", "b"):
        (tmp_path / "d" / f"{name}.txt").write_text(f"some text, {name}")
    (tmp_path / "o").mkdir()
    (tmp_path / "o/ckpt-step-000001.state").touch()  # for --resume
    switches = [row.name for row in command_fields("pretrain") if row.kind is bool]
    file = tmp_path / "c.json"
    paths = {"init": str(tmp_path / "m.gguf"), "data": str(tmp_path / "d"), "output": str(tmp_path / "o")}
    sizes = {"seq_len": 32, "tokens_per_step": 32, "micro_tokens": 32, "steps": 1}
    file.write_text(json.dumps({**paths, **sizes, **dict.fromkeys(switches, True)}))
    words = ["pretrain", "--config", str(file), "--plan", "--json"]
    for more, wanted in ((False, True), (True, False)):
        off = [f"--no-{name.replace('_', '-')}" for name in switches] if more else []
        assert apr([*words, *off]) == 0
        config = json.loads(capsys.readouterr().out)["config"]
        assert {config[name] for name in switches} == {wanted}


def test_environment_variables_are_echoed_and_an_overruled_one_is_named() -> None:
    environment = {"APR_DISTILL_LOG_EVERY": "9", "APR_DISTILL_CHECKPOINT_EVERY": "10", "HOME": "/"}
    _, lines = build("distill", BASE | {"save_every": 11}, None, environment)
    assert sorted(lines) == [
        "APR_DISTILL_CHECKPOINT_EVERY is overridden by --save-every",
        "APR_DISTILL_LOG_EVERY sets --log-every 9",
    ]


def test_a_smoke_run_says_which_options_it_has_no_use_for(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("keep = 3\nlr = 1e-3\n")
    given = BASE | {"log_to": "wandb", "patience": 2}
    assert build("distill", given, file)[1] == []
    (line,) = build("distill", given | {"smoke": 2}, file)[1]
    assert line.endswith("ignores --keep, --patience, --log-to")
    assert build("distill", BASE | {"smoke": 2})[1] == []


@pytest.mark.parametrize(("word", "residency"), [("realizar-q4k", "q4k"), ("auto", "auto"), ("fp8", "fp8")])
def test_the_backend_variable_of_the_reference_is_honoured(word: str, residency: str) -> None:
    assert made(None, {"APR_DISTILL_TEACHER_BACKEND": word}).teacher_residency == residency


@pytest.mark.parametrize("name", ["PER_POSITION", "ALLOW_DEGENERATE_KD", "PROJECT_TO_STEPS"])
def test_other_variables_of_the_reference_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"APR_DISTILL_{name}"):
        made(None, {f"APR_DISTILL_{name}": "1"})


@pytest.mark.parametrize("suffix", ["toml", "yaml", "json"])
def test_every_file_form_is_read_and_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path, suffix: str) -> None:
    text = {"toml": "seed = 5\n{} = 1\n", "yaml": "seed: 5\n{}: 1\n", "json": '{{"seed": 5, "{}": 1}}'}[suffix]
    file = tmp_path / f"c.{suffix}"
    file.write_text(text.format("warmup_steps"))
    assert (made(file).seed, made(file).warmup_steps) == (5, 1)
    file.write_text(text.format("learning_rate"))
    with pytest.raises(UsageError, match="'learning_rate'"):
        made(file)
    file.write_text(text.format("weigth_decay"))
    with pytest.raises(UsageError) as caught:
        made(file)
    assert caught.value.hint == "did you mean weight_decay?"


def test_an_option_that_a_file_gives_twice_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("lr = 1\nlog-every = 7\nlog_every = 8\n")
    with pytest.raises(UsageError, match="'log_every' is given twice"):
        made(file)


def test_an_empty_file_of_options_is_one(tmp_path: Path) -> None:
    for suffix in ("toml", "yaml"):
        (tmp_path / f"c.{suffix}").write_text("# nothing yet\n")
        assert made(tmp_path / f"c.{suffix}") == made()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.json", '{"seed": 1, "seed": 2}', "duplicate key 'seed'"),
        ("c.yaml", "seed: 1\nlr: 1\nseed: 2\n", "line 3: duplicate key 'seed'"),
        ("c.yaml", "data: &a [x, x]\nallow_changed: *a\n", "line 1: anchors and aliases"),
        ("c.yaml", "seed: 1\nlr: [\n", "line 3: not valid YAML"),
        ("c.toml", "seed = 1\nseed = 2\n", "not valid TOML: Cannot overwrite a value"),
        ("c.json", "[1]", "not a list"),
        ("c.json", "[" * 100_000, "not valid JSON"),
        ("c.ini", "seed=1", "must be .toml, .yaml or .json"),
    ],
)
def test_what_is_no_table_of_options_is_said(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        made(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


@pytest.mark.parametrize(
    "text", ["seed = [", "[table]\nseed = 1", "seed = 1.5", 'seed = "x"', "seed = true", "lr = nan"]
)
def test_a_bad_file_is_a_usage_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UsageError):
        made(file)
    with pytest.raises(NotFoundError):
        made(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"teacher": None}, "--teacher"),
        ({"student": None}, "--student"),
        ({"student_init": "layers:2"}, "not both"),
        ({"data": None}, "--data"),
        ({"output": None}, "--output"),
        ({"steps": None}, "--steps or --epochs"),
        ({"kd_weight": 1.5}, "--kd-weight must be between 0 and 1, not 1.5"),
        ({"temperature": 0.0}, "temperature"),
        ({"loss": "kl"}, "unknown loss 'kl': use forward, reverse, skew, jsd, tv"),
        ({"beta": 0.3}, "--loss jsd or skew"),
        ({"beta": 0.3, "loss": "tv"}, "--loss jsd or skew"),
        ({"lr": 0.0}, "--lr"),
        ({"lr": float("nan")}, "--lr"),
        ({"clip": float("inf")}, "--clip must be a number"),
        ({"save_minutes": 10**400}, "--save-minutes must be a number"),
        ({"seq_len": 1}, "--seq-len"),
        ({"tokens_per_step": 5000}, "multiple"),
        ({"micro_tokens": 5000}, "multiple"),
        ({"repeat": True, "epochs": 2}, "mutually exclusive"),
        ({"eval_data": "e", "held_out": 0.2}, "mutually exclusive"),
        ({"smoke": 3, "resume": True}, "--smoke"),
        ({"allow_changed": ("lr",)}, "--resume"),
        ({"allow_changed": ("log_every",), "resume": True}, "log_every"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(**change)
    assert word in f"{caught.value.message} {caught.value.hint}"


def test_a_wrong_value_is_named_as_it_was_set(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("held_out = 2\n")
    with pytest.raises(UsageError, match=r"^held_out must be between 1e-09 and 0.9, not 2.0 \(.*c.toml\)$"):
        made(file)
    with pytest.raises(UsageError, match=r"^log_every must be an integer, not 'x' \(APR_DISTILL_LOG_EVERY\)$"):
        made(None, {"APR_DISTILL_LOG_EVERY": "x"})


def test_options_that_may_change_are_named_as_typed() -> None:
    config = made(resume=True, allow_changed=("--weight-decay", "weight-decay", "held_out"))
    assert config.allow_changed == ("weight_decay", "weight_decay", "held_out")


def test_each_command_has_its_own_start() -> None:
    assert build("pretrain", {"init": "m", "data": "d", "output": "o", "steps": 2})[0].init == "m"
    for given in ({"init": "m", "like": "m"}, {"like": "m"}, {}):
        with pytest.raises(UsageError):
            build("pretrain", {**given, "data": "d", "output": "o", "steps": 2})
    names = {f.name for f in command_fields("pretrain")}
    assert not names & {"teacher", "student", "kd_weight", "temperature", "loss", "teacher_residency"}


def other_value(name: str) -> Any:
    row = schema()[name]
    if row.choices:
        return next(choice for choice in row.choices if choice != row.default)
    if row.kind is bool:
        return True
    if row.kind is str:
        return "other"
    if row.kind is tuple:
        return ("lr",)
    assert row.default is None or isinstance(row.default, (int, float))
    return row.kind(row.default / 2 if row.default else row.low + 1)


@pytest.mark.parametrize("name", list(schema()))
def test_the_digest_covers_every_field_that_decides_the_numbers_and_no_other(name: str) -> None:
    before = Config()
    after = replace(before, **{name: other_value(name)})
    assert after != before
    assert after.to_json()[name] != before.to_json()[name]
    decides = name in what_fields()
    assert (after.digest() != before.digest()) is decides
    assert changed_fields(before.to_json(), after) == ([name] if decides else [])
    assert json.loads(json.dumps(after.to_json())) == after.to_json()


def test_settled_fills_in_what_follows() -> None:
    config = resolve(made(total_steps=10_000))
    assert (config.stop, config.total_steps, config.warmup_steps) == (200, 10_000, 200)
    assert resolve(made()).warmup_steps == 20
    assert resolve(made(steps=None, epochs=3), data_steps=33).stop == 33
    assert resolve(made(smoke=5)).stop == 5
    with pytest.raises(UsageError, match="total-steps"):
        resolve(made(total_steps=100))


def test_the_schedule_warms_up_and_falls_to_its_share() -> None:
    rates = [learning_rate(step, peak=2.0, total=12, warmup=4, final=0.1) for step in range(14)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[4:12] == sorted(rates[4:12], reverse=True)
    assert rates[11] == pytest.approx(0.2)
    assert rates[13] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"student": "s"}, "pretrained"), ({"student": None, "student_init": "layers:3"}, "pruned"),
        ({"student": None, "student_init": "layers:0,+width:hidden=64"}, "pruned"),
        ({"student": None, "student_init": "a/config.json"}, "fresh"),
        ({"student": None, "student_init": "self", "qat": "q4_0"}, "quantized"),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_kind_of_student(how: dict[str, Any], kind: str) -> None:
    """As the table in docs/training.md says; a report compares with the same values."""
    config = made(**how)
    width = 64 if "hidden=64" in str(how) else None  # the other models are not there
    wanted = DEFAULTS[kind] | {"lr": usual_lr(kind, width)}
    assert {name: getattr(config, name) for name in DEFAULTS[kind]} == wanted
    assert made(**how, lr=0.5).lr == 0.5
    usual = usual_values(resolve(config), width or ASSUMED_WIDTH)
    assert {name: usual[name] for name in DEFAULTS[kind]} == wanted
    text = (Path(__file__).parents[2] / "docs/training.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| {kind}"))
    assert [float(cell) for cell in row.split("|")[3:8]] == [*DEFAULTS[kind].values()]


def test_pretraining_from_scratch_is_that_of_a_fresh_student() -> None:
    given = {"like": "m", "shape": "config.json", "data": "d", "output": "o", "steps": 1}
    assert build("pretrain", given)[0].lr == usual_lr("fresh", None)


def test_the_usual_rate_falls_with_the_width_of_the_student(tmp_path: Path) -> None:
    """Whichever option names the model; a width that pruning leaves counts, not that of the teacher."""
    teacher, student = (write_folder(tmp_path / str(width), hidden_size=width) for width in (1152, 2304))
    shape = str(student / "config.json")
    pruned = DEFAULTS["pruned"]["lr"]
    ways: list[tuple[dict[str, Any], float]] = [
        ({"student": None, "student_init": "layers:1"}, pruned / 2),
        ({"student": None, "student_init": "layers:0,+width:heads=2,hidden=512"}, pruned),
        ({"student": str(student)}, DEFAULTS["pretrained"]["lr"] / 4),
        ({"student": None, "student_init": shape}, DEFAULTS["fresh"]["lr"] / 4),
        ({"student": None, "student_init": str(student)}, DEFAULTS["fresh"]["lr"] / 4),
        ({"student": None, "student_init": "self", "qat": "q4_0"}, DEFAULTS["quantized"]["lr"] / 2),
    ]
    for how, rate in ways:
        config, lines = build("distill", BASE | {"teacher": str(teacher)} | how)
        assert config.lr == pytest.approx(rate, rel=0.05), how
        said = any(line.startswith(f"--lr is {config.lr:g} for a ") for line in lines)
        assert said == ("hidden=512" not in str(how))
        assert not any(
            "--lr" in line for line in build("distill", BASE | {"teacher": str(teacher)} | how | {"lr": 0.5})[1]
        )
    given = {"like": str(teacher), "shape": shape, "data": "d", "output": "o", "steps": 1}
    assert build("pretrain", given)[0].lr == pytest.approx(DEFAULTS["fresh"]["lr"] / 4, rel=0.05)


def test_what_follows_from_the_steps_is_no_choice() -> None:
    """A report names the options that differ from what a run of so many steps has by itself."""
    config = resolve(made(lr=0.5))
    usual, found = usual_values(config, ASSUMED_WIDTH), config.to_json()
    assert found["warmup_steps"] == usual["warmup_steps"] != Config().warmup_steps
    assert {name for name, value in usual.items() if value != found[name]} == {*BASE, "lr"}


def test_what_the_run_chose_is_no_choice_of_the_user() -> None:
    automatic, asked = made(), made(micro_tokens=4096, teacher_residency="bf16")
    config = resolve(replace(automatic, micro_tokens=4096, teacher_residency="bf16"))
    usual = usual_values(config, ASSUMED_WIDTH, automatic)
    assert (usual["micro_tokens"], usual["teacher_residency"]) == (4096, "bf16")
    wanted = usual | {"micro_tokens": 0, "teacher_residency": "auto"}
    assert usual_values(config, ASSUMED_WIDTH, asked) == usual_values(config, ASSUMED_WIDTH) == wanted


def test_the_usual_sequence_length_fits_the_shortest_context(tmp_path: Path) -> None:
    """Rounded down to a power of two, which divides the usual step; a length that is given is not changed."""
    short, long = (
        write_folder(tmp_path / str(positions), max_position_embeddings=positions) for positions in (100, 4096)
    )
    config, lines = build("distill", BASE | {"teacher": str(long), "student": str(short), "lr": 0.1})
    assert config.seq_len == 64
    assert config.tokens_per_step % config.seq_len == 0
    assert lines == [f"--seq-len is 64, since the context length of {short} is 100"]
    assert made(teacher=str(long), student=str(short), seq_len=128).seq_len == 128
    assert made(teacher=str(long), student=str(long)).seq_len == 2048
    assert made().seq_len == 2048  # models that are not there are refused when they are opened


def write_folder(folder: Path, **changes: int) -> Path:
    plain_models.write_folder(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
