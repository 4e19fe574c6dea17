import dataclasses
import os

import pytest
import torch

import configurator
import schedule
from configurator import Config, ConfigError
from model import GPT, GPTConfig
from system import errors
from tests.helpers import ROOT
from trainer import distributed, plan, start
from trainer.optimizer import OPTIMIZERS
from trainer.start import parse

CONFIGS = sorted(os.listdir(os.path.join(ROOT, "config")))


def parse_file(tmp_path, text, *args):
    path = tmp_path / "c.py"
    path.write_text(text)
    return parse([str(path), *args])


def test_no_arguments_is_the_quickstart():
    assert parse([]) == parse([os.path.join(ROOT, "config", "quickstart.py")])


def test_expressions_see_defaults_and_earlier_lines(tmp_path):
    text = "batch_size = 5 * 8\nlearning_rate = 1e-2\nmin_lr = learning_rate / 10\n_mine = 3\nseed = _mine + seed"
    c = parse_file(tmp_path, text)
    assert (c.batch_size, c.min_lr, c.seed) == (40, 1e-3, 3)


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path):
    c = parse_file(tmp_path, "n_layer = 3\nn_head = 8", "--n_layer=5")
    assert (c.n_layer, c.n_head, c.n_embd) == (5, 8, Config().n_embd)


def test_numbers_bend_only_where_nothing_is_lost(tmp_path):
    c = parse(["--max_tokens=1e6", "--weight_decay=0", "--cos_attn=1", "--spectral_qkv=(0,2)", "--resume=auto", "--bias=False"])
    assert c.max_tokens == 1_000_000 and isinstance(c.max_tokens, int)
    assert c.weight_decay == 0.0 and isinstance(c.weight_decay, float)
    assert (c.cos_attn, c.spectral_qkv, c.resume, c.bias) == ((1,), (0, 2), "auto", False)
    assert parse_file(tmp_path, "resume = True\ncompile = False").resume == "True"


@pytest.mark.parametrize("args, words", [
    (["--learning_rat=1"], ["learning_rat", "learning_rate"]),
    (["--gradient_accumulation_steps=4"], ["batch_size", "micro_batch_size"]),
    (["--max_iters=4"], ["max_tokens"]),
    (["--zzzzzz=1"], ["zzzzzz", "--help"]),
    (["--n_layer"], ["--n_layer=..."]),
    (["--n_layer=two"], ["n_layer='two'", "number"]),
    (["--n_layer=2.5"], ["n_layer=2.5", "whole"]),
    (["--max_tokens=1e999"], ["max_tokens", "whole"]),
    (["--learning_rate=1e999"], ["learning_rate", "finite"]),
    (["--bias=maybe"], ["bias='maybe'", "True or False"]),
    (["--max_tokens=2.0001k"], ["max_tokens='2.0001k'", "whole"]),
    (["-batch_size=16"], ["-batch_size=16", "--batch_size=16"]),
    (["batch_size=16"], ["batch_size=16", "--batch_size=16"]),
    (["--init_from=resume"], ["init_from='resume'", "--resume=True"]),
    (["--cos_attn=x"], ["cos_attn='x'", "tuple"]),
    (["--cos_attn=9"], ["cos_attn=(9,)", "0 to 3"]),
    (["--norm=layernrm"], ["norm='layernrm'", "did you mean layernorm"]),
    (["--dtype=int8"], ["dtype='int8'", "float32"]),
    (["--n_embd=130"], ["n_embd=130", "n_head=4"]),
    (["--batch_size=4"], ["batch_size=4", "micro_batch_size=8"]),
    (["--batch_size=20"], ["batch_size=20", "16 or 24"]),
    (["--batch_size_start=12"], ["batch_size_start=12", "multiple"]),
    (["--batch_size_start=72"], ["batch_size_start=72", "batch_size=32"]),
    (["--warmup_tokens=4e6"], ["warmup_tokens=4000000", "max_tokens=2500000"]),
    (["--decay_tokens=10"], ["decay_tokens=10", "warmup_tokens"]),
    (["--min_lr=1"], ["min_lr=1.0", "learning_rate"]),
    (["--dropout=1"], ["dropout=1.0"]),
    (["--beta2=1"], ["beta2=1.0"]),
    (["--micro_batch_size=0"], ["micro_batch_size=0", "at least 1"]),
    (["--grad_clip=-1"], ["grad_clip=-1.0", "negative"]),
    (["config/gpt_111.py"], ["config/gpt_111.py", "did you mean config/gpt_111m.py"]),
    (["a.py", "b.py"], ["one config file"]),
])
def test_bad_input_is_named_with_its_remedy(args, words):
    with pytest.raises(ConfigError) as e:
        parse(args)
    assert "\n" not in str(e.value)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize("text, words", [
    ("n_layers = 3", ["n_layers", "did you mean n_layer?"]),
    ("gradient_accumulation_steps = 5 * 8", ["batch_size and micro_batch_size"]),
    ("n_layer = 'two'", ["n_layer='two'", "number"]),
    ("n_layer = = 2", ["SyntaxError"]),
    ("n_layer = 1 / 0", ["ZeroDivisionError"]),
    ("def f(): pass", ["'f'"]),
])
def test_a_bad_config_file_fails_as_the_command_line_does(tmp_path, text, words):
    with pytest.raises(ConfigError) as e:
        parse_file(tmp_path, text)
    assert "c.py" in str(e.value)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize("args, expected", [
    (["--max_tokens=200k"], {"max_tokens": 200_000}), (["--max_tokens=2M"], {"max_tokens": 2_000_000}),
    (["--max_tokens", "1.5B"], {"max_tokens": 1_500_000_000}), (["--max_tokens=1_000_000"], {"max_tokens": 1_000_000}),
    (["--wandb_log=true"], {"wandb_log": True}), (["--wandb_log=1"], {"wandb_log": True}),
    (["--wandb_log"], {"wandb_log": True}), (["--wandb_log", "no", "--bias=off"], {"wandb_log": False, "bias": False}),
    (["--wandb-log", "--seed=1"], {"wandb_log": True}),
    (["--batch_size", "16"], {"batch_size": 16}), (["--batch-size=16"], {"batch_size": 16}),
    (["--resume", "auto"], {"resume": "auto"}), (["--resume"], {"resume": "True"}), (["--compile=true"], {"compile": "True"}),
    (["--compile", "0"], {"compile": "False"}), (["--dtype=bf16"], {"dtype": "bfloat16"}),
    (["--device=CPU"], {"device": "cpu"}), (["--init_from=scratch"], {"init_from": ""}),
    (["--cos_attn", "(0,1)"], {"cos_attn": (0, 1)}),
    (["--learning_rate", "6e-4"], {"learning_rate": 6e-4}),
    (["--wandb_log", "config/wikitext2.py"], {"wandb_log": True, "dataset": "wikitext-2"}),
], ids=str)
def test_values_are_taken_as_people_write_them(args, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = parse(args)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("args, name", [
    ([], "quickstart"), (["--batch_size=16"], "quickstart-batch_size=16"), (["--batch_size=32"], "quickstart"),
    (["--max_tokens=200k", "--device=cpu", "--wandb_log"], "quickstart-max_tokens=200k"),
    (["--dataset=/data/my books/"], "quickstart-dataset=my_books"), (["--cos_attn=(0, 1)"], "quickstart-cos_attn=0,1"),
    (["config/wikitext2.py", "--learning_rate=2e-3"], "wikitext2-learning_rate=0.002"), (["--out_dir=out/x"], None),
    (["config/wikitext2.py", "--out_dir=out/x", "--batch_size=16"], None)], ids=str)
def test_a_run_is_called_after_its_config_and_what_was_changed(args, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert start.parse_named(args)[1] == name


def test_a_run_shorter_than_its_warm_up_gets_a_shorter_one_and_says_so(capsys):
    c = parse(["--max_tokens=100k"])
    assert c.warmup_tokens == 5000 and capsys.readouterr().out.startswith("warmup_tokens=125000 is taken as 5000: ")
    assert parse(["--max_tokens=100k", "--warmup_tokens=0"]).warmup_tokens == 0 and not capsys.readouterr().out


def test_long_names_end_between_keys():
    changed = {key: 1 for key in ("batch_size", "batch_size_start", "max_tokens", "n_layer", "n_head")}
    assert start.run_name("c", changed) == "c-batch_size=1-batch_size_start=1-max_tokens=1-n_layer=1-more"


def test_help_lists_every_key_with_default_and_reason():
    text = configurator.help_text()
    assert all(f"--plan --{option}" in text for option in plan.OPTIONS) and all(kind in text for kind in plan.KINDS)
    assert "--eval" in text
    for f in dataclasses.fields(Config):
        assert f"--{f.name}={f.default!r}" in text and f.metadata["why"] in text


def test_every_optimizer_can_be_chosen():
    assert configurator.FIELDS["optimizer"].metadata["choices"] == tuple(OPTIMIZERS)


def test_every_key_says_whether_it_may_change():
    for f in dataclasses.fields(Config):
        assert f.metadata.get("change") in configurator.CHANGES, f"{f.name}: opt(default, FIXED | BRANCH | FREE, why)"
    with pytest.raises(TypeError):
        configurator.opt(1, "no declaration")


def test_what_is_computed_stays_and_where_it_is_computed_may_change():
    resume, branch = configurator.free_keys(), configurator.free_keys(branch=True)
    assert resume == {"verbose", "out_dir", "device", "compile", "activation_checkpointing", "resume", "wandb_log",
                      "wandb_project", "wandb_run_name", "wandb_entity", "wandb_group", "wandb_tags", "wandb_notes",
                      "wandb_job_type", "parallel", "micro_batch_size", "eval_tokens", "eval_iters", "log_interval",
                      "checkpoint_tokens", "keep_checkpoints", "stop_tokens", "branch_from", "grad_stats", "deterministic"}
    assert branch - resume == {"batch_tokens",
        "seed", "batch_size", "batch_schedule", "batch_size_start", "batch_steps", "batch_file", "batch_gns_factor",
        "batch_gns_margin", "batch_gns_dwell_tokens", "batch_shrink", "max_tokens", "warmup_tokens", "decay_tokens",
        "learning_rate", "min_lr", "lr_decay", "lr_scaling", "lr_reference_batch", "beta2", "beta2_scaling", "weight_decay",
        "weight_decay_scaling", "batch_objective", "gns_metric", "batch_late", "lr_saturates",
        "beta2_floor"}
    lines = configurator.help_text().splitlines()
    for name in configurator.FIELDS:
        line = next(line for line in lines if line.startswith(f"  --{name}="))
        assert ("on resume" in line) == (name in resume) and ("on a branch" in line) == (name in branch - resume)


def test_every_range_is_checked_from_the_file_too(tmp_path):
    checked = [name for name, f in configurator.FIELDS.items() if f.metadata["valid"]]
    assert len(checked) == 32
    for name in checked:
        with pytest.raises(ConfigError, match=f"^{name}="):
            parse_file(tmp_path, f"{name} = -1")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_every_config_file_runs_as_it_is_on_any_usual_number_of_devices(name, processes, capsys):
    path = os.path.join(ROOT, "config", name)
    one, c = parse([path]), parse([path], processes)
    configurator.check(c, processes)
    distributed.check(c, processes, "cuda")
    changed = {key for key in configurator.FIELDS if getattr(c, key) != getattr(one, key)}
    assert changed <= ({"micro_batch_size", "batch_size_start"} if (name, processes) == ("wikitext2.py", 8)
                       else {"micro_batch_size"})
    said = capsys.readouterr().out
    assert bool(said) == bool(changed)
    assert all(f"{key}={getattr(one, key)} is taken as {getattr(c, key)}" in said for key in changed)
    assert not changed if processes == 1 else c.micro_batch_size <= one.micro_batch_size
    batches = schedule.build(c, c.micro_batch_size * processes)
    assert batches.at(0) == c.batch_size_start and batches.at(c.max_tokens) == one.batch_size


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_papers_schedule_is_the_same_on_several_devices_token_by_token(processes):
    path = os.path.join(ROOT, "config", "gpt_111m.py")
    one, several = parse([path]), parse([path], processes)
    a, b = schedule.build(one, one.micro_batch_size), schedule.build(several, several.micro_batch_size * processes)
    assert all(a.at(t) == b.at(t) for t in range(0, one.max_tokens, one.max_tokens // 1000))


def test_what_was_typed_is_taken_as_it_is(tmp_path, capsys):
    path = tmp_path / "c.py"
    path.write_text("batch_size = 120\nbatch_size_start = 16")
    with pytest.raises(ConfigError, match="batch_size=120: is not a multiple of .*=8 x 8 processes = 64: take 64 or 128"):
        parse([str(path), "--micro_batch_size=8"], 8)
    c = parse([str(path), "--micro_batch_size=8", "--batch_size=128"], 8)
    assert "batch_size_start=16 is taken as 64" in capsys.readouterr().out
    assert (c.micro_batch_size, c.batch_size_start) == (8, 64)
    c = parse([str(path), "--batch_size=128", "--batch_size_start=64"], 8)  # what the words advise
    assert c.micro_batch_size == 8 and not capsys.readouterr().out
    with pytest.raises(ConfigError, match="batch_size_start=4: is not a multiple of .* x 8 processes = 8: take 8$"):
        parse([str(path), "--batch_size_start=4"], 8)
    with pytest.raises(ConfigError, match="batch_size=120: .* x 7 processes = 21: take 105 or 126$"):
        parse([str(path)], 7)
    c = parse([str(path), "--batch_schedule=steps", "--batch_steps=0:12, 1M:24"], 4)
    assert c.micro_batch_size == 3
    with pytest.raises(ConfigError, match="batch_steps='0:x'"):
        parse([str(path), "--batch_schedule=steps", "--batch_steps=0:x"], 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_is_valid(name):
    assert parse([os.path.join(ROOT, "config", name)]).out_dir == f"out/{name[:-3]}"


@pytest.mark.parametrize("name, millions", [("gpt_70m", 70), ("gpt_111m", 111), ("gpt_161m", 161), ("gpt_1_3b", 1316)])
def test_parameter_counts_are_what_the_names_say(name, millions):
    c = parse([os.path.join(ROOT, "config", name + ".py")])
    with torch.device("meta"):
        model = GPT(GPTConfig(c.n_layer, c.n_head, c.n_embd, c.block_size))
    assert round(model.parameter_count() / 1e6) == millions


def test_siblings_spend_the_flops_of_the_111m_model():
    flops = {}
    for name in ("gpt_70m", "gpt_111m", "gpt_161m"):
        c = parse([os.path.join(ROOT, "config", name + ".py")])
        with torch.device("meta"):
            model = GPT(GPTConfig(c.n_layer, c.n_head, c.n_embd, c.block_size))
        flops[name] = 6 * model.parameter_count() * c.max_tokens
    assert all(abs(f / flops["gpt_111m"] - 1) < 0.01 for f in flops.values())


def test_the_111m_config_has_the_papers_figures():
    c = parse([os.path.join(ROOT, "config", "gpt_111m.py")])
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.micro_batch_size) == (10, 12, 768, 2048, 8)
    assert (c.batch_size, c.batch_size_start, c.batch_schedule, c.cos_attn) == (120, 16, "linear", (1,))
    assert (c.max_tokens, c.warmup_tokens, c.learning_rate) == (2_219_950_080, 374_784_000, 1.17e-3)
    assert c.min_lr == pytest.approx(1.17e-4) and (c.beta1, c.beta2, c.weight_decay, c.grad_clip) == (0.9, 0.95, 0.1, 1.0)


@pytest.mark.parametrize("local, rank, world, said", [
    ("1", "1", "2", False), ("0", "2", "4", True), ("", "", "", True), ("9" * 30, "", "9" * 30, True),
    ("9" * 9, "1", "2", True), ("9" * 5000, "9" * 5000, "9" * 5001, True)])
def test_one_process_of_each_machine_says_what_is_wrong_and_so_does_one_of_no_launcher(monkeypatch, capsys, local, rank, world,
                                                                                        said):
    for name, value in (("LOCAL_RANK", local), ("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        errors.die("wrong")
    assert end.value.code == 2 and capsys.readouterr().err == "error: wrong\n" * said
