"""The command line: its JSON keys, its errors, its files."""

import gzip
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import pipelab
from pipelab import Costs, Schedule, make, simulate
from pipelab.cli import COMMANDS, main
from pipelab.cli.report import as_json

KEYS = [
    *("schedule", "devices", "stages", "microbatches", "batches", "makespan", "span", "ideal"),
    *("bubble", "peak_in_flight", "weight_versions", "rows", "start", "end"),
]
SMALL = "gpipe --devices 2 --microbatches 2"
FOUR = "gpipe --devices 4 --microbatches 8"
PIPEDREAM = "pipedream --devices 2 --microbatches 2"


def call(capsys, line):
    """Exit status, output, errors."""
    return main(line.split()), *capsys.readouterr()


def refused(capsys, line):
    """The one line, of status 2, in which the command says what is wrong."""
    status, out, err = call(capsys, line)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    return err


def test_simulate_json(capsys):
    status, out, err = call(capsys, "simulate gpipe --devices 4 --microbatches 8 --json")
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert list(result) == KEYS
    assert result["makespan"] == 33
    assert round(result["bubble"]["of_total"], 4) == 0.2727
    assert list(result["bubble"]) == ["of_total", "over_ideal", "of_span"]
    assert result["bubble"]["over_ideal"] == 0.375
    assert result["peak_in_flight"] == [8, 8, 8, 8]
    assert result["weight_versions"] == [1, 1, 1, 1]
    assert result["rows"][0][:2] == ["0F0", "0F1"]
    assert result["end"][0][-1] == 33


def test_all_options_of_simulate(capsys, tmp_path):
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "png", "json")}
    line = (
        "simulate interleaved --devices 2 --virtual 2 --microbatches 4 --batches 2 "
        "--costs forward=1,2,1,2,input_grad=2,weight-grad=1,transfer=0.5,update=1,recompute=always "
        f"--csv {files['csv']} --plot {files['png']} --trace {files['json']}"
    )
    status, out, _ = call(capsys, line)
    assert status == 0
    assert "interleaved, simulated: 2 devices, 4 stages" in out
    assert "waiting for a gradient" in out
    assert Schedule.from_csv(files["csv"].read_text()) == make(
        "interleaved", 2, 4, virtual=2, batches=2
    )
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["json"].read_text())["traceEvents"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "out.json", "out.png"]


def test_vertical_sync_by_name(capsys):
    _, out, _ = call(capsys, "simulate pipedream,reads=first --devices 4 --microbatches 8 --json")
    assert json.loads(out)["weight_versions"] == [4, 4, 4, 4]


def test_a_csv_file_is_a_schedule_too(capsys, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    status, out, _ = call(capsys, f"simulate {table} --json")
    assert status == 0
    assert json.loads(out)["schedule"] == "mine"
    status, out, _ = call(capsys, f"validate {table}")
    *_, told = out.splitlines()
    assert status == 0 and str(Schedule.from_torch_csv(table.read_text(), "mine")) in out
    assert told == (
        "valid: 2 devices, 2 stages, 1 x 2 micro-batches, complete, in order, no deadlock"
    )
    found = json.loads(call(capsys, f"validate {table} --json")[1])
    assert found["valid"] and found["rows"][1] == ["1F0", "1B0", "1F1", "1B1", "1U0"]


# 1F1B as torch's runtime dumps it, the last stage's second forward overlapped.
DUMPED = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,(1F1;1B1)OVERLAP_F_B,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_tables_with_transfers_are_simulated_exported_and_run(capsys, tmp_path, ours):
    """torch's run beside the compute; in ours SEND and RECV meet, and a device waits in them."""
    same, file, folder = make("pipedream_flush", 2, 2), tmp_path / "table.csv", tmp_path / "out"
    file.write_text(same.with_transfers().to_csv() if ours else DUMPED)
    valid = "its transfers safe for rendezvous"
    assert valid in call(capsys, f"validate {file}")[1]
    status, out, _ = call(capsys, f"simulate {file} --plot {tmp_path / 'x.svg'}")
    assert (status, "waiting for a gradient" in out) == (0, not ours)
    assert call(capsys, f"export {file} --out {folder}")[0] == 0
    assert (folder / "schedule.csv").read_text() == same.to_torch_csv()
    status, out, _ = call(capsys, f"run {file} --json")
    assert status == 0 and json.loads(out)["check"]["passed"]


MANY = "more than 10,000,000 actions"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("simulate gpipe", "gpipe needs --devices and --microbatches"),
        ("simulate gpipe --devices 4", "gpipe needs --microbatches"),
        (f"simulate {SMALL} --costs backward=2", "backward=2: give input_grad= and weight_grad="),
        ("plan --devices 2 --batch 4 --machine A100-80GB --model no.json", "no.json: there is no"),
        ("simulate gpip --devices 4 --microbatches 8", "did you mean gpipe?"),
        ("simulate gpip", "did you mean gpipe?"),
        (f"simulate {FOUR} --virtual 2", "gpipe fixes its number of stages"),
        (f"simulate {FOUR} --costs forward=1,2", "forward has 2 values for 4 stages"),
        (f"simulate {FOUR} --costs forward=-1", "forward=-1.0"),
        ("simulate pipedream_2bw --devices 4 --microbatches 2", "microbatches >= devices, got 2"),
        ("simulate nothing.csv", "No such file"),
        (f"simulate {SMALL} --plot /nowhere/x.png", "there is no folder /nowhere"),
        (f"simulate {SMALL} --plot x.nothing", "Format 'nothing' is not supported"),
        (f"simulate {SMALL} --csv x.csv --trace nowhere/x.json", "there is no folder nowhere"),
        (f"validate {PIPEDREAM} --csv x --torch", "updates without a flush"),
        (f"validate {SMALL} --csv x --torch --transfers", "leave out --transfers"),
        (f"run {SMALL} --device meta", "device 'meta': this machine"),
        (f"run {SMALL} --device cuda:64", "device 'cuda:64'"),
        (f"run {SMALL} --balance 1,2,3", "--balance 1,2,3 has 3 stages, but gpipe has 2: give"),
        (f"run {SMALL} --balance type:Foo", "method='type:Foo': no layer matches; there are Lin"),
        (f"run {SMALL} --balance 1,2 --backend jax", "leave out --model, --dropout and --balance"),
        ("train gpt2 --balance 3,5", "balance [3, 5] for 14 layers: give every stage at least one"),
        (f"simulate {SMALL} --plot x", "--plot x: Format '' is not supported: name a file that"),
        (f"simulate {SMALL} --plot .", "--plot . is a folder: name a file"),
        (f"simulate {SMALL} --csv .", "--csv . is a folder: name a file"),
        (f"simulate {SMALL} --csv x --trace x", "--csv x and --trace x overlap"),
        (f"simulate {SMALL} --costs transfer=inf", "transfer=inf: give numbers of at least 0"),
        (f"simulate {SMALL} --costs update=1,nan", "update=[1.0, nan]: give numbers of at least 0"),
        (f"simulate gpipe --devices {10**20} --microbatches 2", f"{MANY}; use smaller sizes"),
        ("validate gpipe --devices 100000 --microbatches 100000", MANY),
        # Few of its micro-batches would stay, but it is built for as many as there are devices.
        ("simulate interleaved --virtual 2 --devices 100000 --microbatches 1", MANY),
        # It is made for at least twice as many as devices.
        ("simulate dualpipe_v --devices 100000 --microbatches 1", MANY),
        ("compare --devices 10000000", "gpipe devices=10000000 microbatches=4 virtual=1"),
        ("compare --microbatches 10000000", MANY),
        ("compare --costs forward=1 --devices 1000000000 --microbatches 2", MANY),
        ("compare --costs forward=1 --devices 2 --microbatches 1000000000", f"{MANY}; use"),
        ("search --devices 1000000000 --microbatches 2", "give at most 100,000 stages"),
        ("search --devices 2 --microbatches 2 --virtual 1000000000", "at most 100,000 stages"),
        ("search --devices 1000000000 --microbatches 2 --placement v", "at most 100,000 stages"),
        ("search --devices 2 --microbatches 100000", "600,000 actions. The search takes at most"),
        (f"simulate {SMALL} --costs forwad=1", "--costs: forwad=1: did you mean forward? There"),
        (f"simulate {SMALL} --costs förward=1", "förward=1: did you mean forward?"),
        (f"simulate {SMALL} --costs=", "--costs: '': give a name, a file or NAME=VALUE"),
        (f"simulate {SMALL} --costs nothing.json", "nothing.json: there is no such file"),
        (f"simulate {SMALL} --costs forward=1,forward=2", "forward is given twice"),
        (f"simulate {SMALL.replace('gpipe', 'gpipe,overlap=1')}", "overlap='1': give yes or no"),
        (f"simulate {SMALL} --device 2", "--device: not an option; did you mean --devices?"),
        ("simulat gpipe", "'simulat': did you mean simulate?"),
        ("compare --memory 3", "--memory and --whole are for predictions: add --costs"),
        ("compare --costs forward=1 --memory 0.5", "memory=0.5: give at least 1"),
        ("compare --costs forward=1,2,3", "forward has 3 values for 2 stages"),
        ("", "give a command: simulate, run, train"),
        ("bogus", "'bogus': The commands are simulate, run"),
        ("simulate", "the following arguments are required: NAME"),
        ("train gpt2 --balance pipedream", "'pipedream': give counts such as 3,5,5,1"),
        # What old versions of the command had.
        ("bound --devices 4", "`pipelab bound` is now `pipelab compare --profile FILE`"),
        ("explain trace.json", "`pipelab explain` is now `pipelab diagnose`"),
        ("schedule gpipe", "`pipelab schedule` is now `pipelab validate`"),
        (f"simulate {SMALL} --forward 2", "--forward 2 is now --costs forward=2"),
        (f"simulate {SMALL} --input-grad=1,2", "--input-grad 1,2 is now --costs input_grad=1,2"),
        (f"run {SMALL} --offload --json", "--offload is now NAME,offload=yes"),
        ("compare --transfer 1", "--transfer 1 is now --costs transfer=1"),
        ("plan --layers 96 --devices 4", "--layers 96 is now --model layers=96"),
        ("plan --flops 1e12", "--flops 1e12 is now --machine flops=1e12"),
        ("plan --tensor 1,2", "--tensor 1,2 is now --training tensor=1,2"),
        ("plan --devices 4 --samples 8", "--samples 8 is now --model samples=8"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "values", "remedy"),
    [
        ("--devices", "x -1 0", "a whole number of at least 1"),
        ("--microbatches", "0", "a whole number of at least 1"),
        ("--dropout", "nan 1 -0.1", "a number of at least 0 and below 1"),
        ("--replicas", "-2", "a whole number of at least 1"),
        ("--timeout", "0 1e308", "a finite number above 0, at most a million"),
        ("--paced", "nan 0 1e308", "a finite number above 0, at most a million"),
        ("--seed", f"-1 {10**20}", "a whole number from 0 to 2 ** 32 - 1"),
        ("--balance", "3,0 3,x 3,1000000000", "counts such as 3,5,5,1, at most"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_would(capsys, option, values, remedy):
    for value in values.split():
        said = refused(capsys, f"run gpipe {option} {value}")
        assert f"error: {option}: '{value}': give {remedy}" in said


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"compare"}))  # that one needs nothing
def test_a_command_alone_says_what_it_needs(capsys, name):
    # Was: zip() argument 2 is longer than argument 1.
    status, out, err = call(capsys, name)
    assert (status, out) == (2, "")
    assert err.startswith(f"pipelab {name}: error: the following arguments are required: ")


def test_a_run_s_trace_is_diagnosed(capsys, tmp_path):
    trace = tmp_path / "run.json"
    status, out, err = call(capsys, f"run {SMALL} --trace {trace} --json")
    assert (status, err) == (0, "")
    measured = json.loads(out)["measured"]
    status, out, err = call(capsys, f"diagnose {trace} --json")
    assert (status, err) == (0, "")
    assert json.loads(out)["idle"] == pytest.approx(measured["bubble"]["of_total"])


def test_ten_commands_with_125_options_whose_help_fits_a_screen(capsys):
    options = 0
    assert len(COMMANDS) == 10
    for name, command in COMMANDS.items():
        status, out, _ = call(capsys, f"{name} --help")
        usage, *lines = out.splitlines()
        assert status == 0 and usage.strip() == "usage:" and len(lines) < 40
        for example in lines[:2]:
            program, own, *words = shlex.split(example)
            assert (program, own) == ("pipelab", name)
            if not any(word.endswith(".txt") for word in words):
                command.read(words)  # raises for words that do not fit
        options += len(command.options)
        assert set(command.options) <= set(re.findall(r"^  (--[\w-]+)", out, re.M))
    assert options <= 125
    overview = call(capsys, "--help")[1]
    assert all(f"  {name} " in overview for name in COMMANDS)


def test_the_costs_of_a_run_are_those_of_a_simulation(capsys, tmp_path):
    """What `run --fit` writes, `simulate --costs` reads; names after it change it."""
    file = tmp_path / "costs.json"
    assert call(capsys, f"run {SMALL} --fit {file}")[0] == 0
    costs = Costs(**json.loads(file.read_text()))
    for more, expected in (
        ("", costs),
        (",transfer=1,forward=1,2", replace(costs, transfer=1, forward=(1, 2))),
    ):
        out = call(capsys, f"simulate {SMALL} --costs {file}{more} --json")[1]
        assert json.loads(out)["makespan"] == simulate(make("gpipe", 2, 2), expected).makespan
    file.write_text("[1]")
    assert "has no costs: give a JSON object" in refused(capsys, f"simulate {SMALL} --costs {file}")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("--save file/D", "--save file/D: there is no folder file"),
        ("--save /proc/x/D", "--save /proc/x/D: cannot write in /proc"),
        ("--csv file/x", "--csv file/x: there is no folder file"),
        ("--trace /proc/x", "--trace /proc/x: cannot write in /proc"),
        ("--plot /proc/x.png", "--plot /proc/x.png: cannot write in /proc"),
    ],
)
def test_what_cannot_be_written_is_found_before_the_work(
    capsys, targets, message, tmp_path, monkeypatch
):
    def work(*arguments, **options):
        raise AssertionError("it has begun")

    monkeypatch.setattr(pipelab, "simulate", work)
    monkeypatch.setattr(pipelab, "run", work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    command = "run" if "D" in targets else "simulate"
    assert message in refused(capsys, f"{command} {SMALL} {targets}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["zb", "zb_v", "v_half", "dualpipe_v", "zb_h1"])
def test_many_devices_and_few_micro_batches_are_no_large_table(capsys, name):
    status, out, _ = call(capsys, f"simulate {name} --devices 200 --microbatches 1 --json")
    assert status == 0 and json.loads(out)["devices"] == 200


@pytest.mark.parametrize("command", ["simulate", "run"])
def test_an_interrupt_is_one_line_and_status_130(capsys, command, monkeypatch):
    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pipelab, "simulate", interrupted)
    monkeypatch.setattr(pipelab, "run", interrupted)
    assert call(capsys, f"{command} {SMALL}") == (130, "", f"pipelab {command}: interrupted\n")


def test_broken_tables(capsys, tmp_path):
    broken, stuck = tmp_path / "broken.csv", tmp_path / "stuck.csv"
    broken.write_text("0F0,0B0\n1F0,1B0,1X0\n")
    stuck.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    told = refused(capsys, f"simulate {broken}")
    assert "broken.csv: row 1, cell 2: '1X0' is not an action" in told
    assert "deadlock" in refused(capsys, f"simulate {stuck}")
    told = refused(capsys, f"simulate {stuck} --devices 2")
    assert "has its own sizes: leave out --devices" in told
    status, _, err = call(capsys, f"validate {stuck}")
    assert status == 1
    assert ">0B0<" in err


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0,0U99999999999999999999999",
        "# microbatches=100000000000\n0F0,0B0",
        "# batches=9\n0F0,0B0",
        "# devices=999999999\n0F0,0B0",
        "# devices=-1\n0F0,0B0\n1F0,1B0",
        "0F0\n" * 10_001,
        "," * 10_000_001,
    ],
    ids=lambda text: text[:20],
)
def test_numbers_beyond_reason(capsys, tmp_path, text):
    table = tmp_path / "huge.csv"
    table.write_text(text)
    told = refused(capsys, f"validate {table}")
    if text.startswith("# devices=9"):
        assert "devices=999999999: give at most 10,000, a line each" in told


@pytest.mark.parametrize("command", ["validate", "partition --devices 1 --profile"])
def test_a_file_is_read_up_to_a_limit_of_unfolded_bytes(capsys, tmp_path, command):
    file = tmp_path / "blanks.csv"
    file.write_bytes(gzip.compress(b" " * (2**26 + 1), 1))
    error = "blanks.csv: more than 67,108,864 bytes: give a smaller file\n"
    assert call(capsys, f"{command} {file}")[2].endswith(error)
    assert call(capsys, f"{command} /dev/zero")[0] == 2


def test_a_files_name_is_no_formula(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$x^$.csv").write_text(make("gpipe", 2, 2).to_torch_csv())
    assert call(capsys, "simulate $x^$.csv --plot out.svg")[::2] == (0, "")


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    line = "validate gpipe --devices 8 --microbatches 4096"
    command = f"{sys.executable} -m pipelab {line} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_a_table_goes_through_a_pipe():
    command = f"{sys.executable} -m pipelab simulate {SMALL} --csv /dev/stdout | head -3"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert Schedule.from_csv(done.stdout) == make("gpipe", 2, 2)


def test_links_stay_links(capsys, tmp_path):
    target, link = tmp_path / "real.csv", tmp_path / "link.csv"
    link.symlink_to(target)
    assert call(capsys, f"simulate gpipe --devices 2 --microbatches 2 --csv {link}")[0] == 0
    assert link.is_symlink()
    assert Schedule.from_csv(target.read_text()) == make("gpipe", 2, 2)


@pytest.mark.parametrize("target", ["--csv out.csv", "--trace out.json", "--plot out.png"])
def test_what_a_link_leads_to_is_not_replaced(capsys, target, tmp_path, monkeypatch):
    # Was: replaced, without a word.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_text("x")
    (tmp_path / target.split()[1]).symlink_to("precious")
    told = refused(capsys, f"simulate {SMALL} {target}")
    assert f"{target} is a link to {tmp_path}/precious, which exists: name that file" in told
    assert (tmp_path / "precious").read_text() == "x"


def test_validate_prints_the_grid_or_writes_csv(capsys, tmp_path):
    line, file = "validate gpipe --devices 2 --microbatches 1", tmp_path / "table.csv"
    _, *grid, told = call(capsys, line)[1].splitlines()
    assert grid == ["0F0 .   .   0B0 0U0", ".   1F0 1B0 1U0 ."]
    assert call(capsys, f"{line} --csv {file}")[1] == f"{told}\n"
    assert Schedule.from_csv(file.read_text()) == make("gpipe", 2, 1)
    call(capsys, f"{line} --csv {file} --torch")
    assert file.read_text() == "0F0,0B0\n1F0,1B0\n"
    call(capsys, f"{line} --csv {file} --transfers")
    assert Schedule.from_csv(file.read_text()) == make("gpipe", 2, 1).with_transfers()


@pytest.mark.parametrize(
    "line",
    [
        "gpipe --model mlp --paced 0.002",
        "pipedream --batches 2",
        "pipedream_2bw --batches 3 --backend processes",
        "interleaved --virtual 2 --model gpt2 --recompute always --batches 2",
    ],
)
def test_run_json(capsys, line):
    status, out, err = call(capsys, f"run {line} --devices 2 --microbatches 3 --json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert " ".join(result["check"]) == "passed how rule ratio limit worst reasons unjudged"
    assert result["check"]["passed"] is True
    assert len(result["losses"]) == result["batches"]
    assert set(KEYS) <= set(result["measured"])
    assert set(KEYS) <= set(result["simulated"])
    assert result["measured"]["rows"] == result["simulated"]["rows"]


@pytest.mark.parametrize(
    ("balance", "counts"),
    [("3,5,5,1", "3,5,5,1"), ("type:GPT2Block", "2,1,1,2"), ("parameters", "1,2,2,1")],
)
def test_run_balance(capsys, balance, counts):
    """By counts the model has as many layers; embedding and head weigh as much as a block each."""
    line = f"run gpipe --devices 4 --microbatches 2 --model gpt2 --balance {balance}"
    status, out, err = call(capsys, line)
    assert (status, err) == (0, "")
    assert out.startswith(f"balance {counts}\n")


def test_times_balance_in_one_process_alone(capsys, monkeypatch):
    line = "run gpipe --devices 2 --microbatches 2 --balance time"
    status, out, err = call(capsys, f"{line} --json")
    assert status == 0 and json.loads(out)["check"]["passed"]
    assert sum(map(int, err.removeprefix("balance ").split(","))) == 4
    monkeypatch.setenv("RANK", "0")
    assert "--balance time: every rank would measure different times; give" in refused(capsys, line)


def test_train_into_a_file_writes_lines(capsys, tmp_path):
    """Of published weights, too, which transformers loads under a bar; and goes on with its cut."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from pipelab.models import data

    sizes = {"vocab_size": 512, "n_positions": 32, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=data.corpus(512).tokenizer)
    tokenizer.save_pretrained(tmp_path / "gpt2")
    capsys.readouterr()
    line = f"train gpt2 --pretrained {tmp_path / 'gpt2'} --batch 4 --save {tmp_path / 'kept'}"
    status, out, err = call(capsys, f"{line} --steps 2 --every 1 --balance 2,4")
    assert (status, err) == (0, "")
    shown = [line.split()[0] for line in out.splitlines()]
    assert shown == ["balance", "step", "step", "The"] and "\r" not in out
    status, _, err = call(capsys, f"{line} --steps 3 --balance 3,3")
    assert status == 2 and "balance=[2, 4]), not" in err


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
@pytest.mark.parametrize("how", ["", "--paced 0.002"])
def test_stop_and_resume(capsys, name, how, tmp_path):
    line, kept = f"run {name} --devices 2 --microbatches 3 --batches 4 {how} --json", tmp_path / "A"
    losses = []
    for part in ("", f"--stop 2 --save {kept}", f"--resume {kept}"):
        status, out, err = call(capsys, f"{line} {part}")
        assert (status, err) == (0, "")
        result = json.loads(out)
        assert result["check"]["passed"] is True
        assert result["measured"]["rows"] == result["simulated"]["rows"]
        losses.append(result["losses"])
    whole, stopped, resumed = losses
    assert stopped + resumed == whole


def test_run_on_jax(capsys):
    status, out, err = call(
        capsys, "run pipedream --devices 2 --microbatches 3 --batches 2 --backend jax --json"
    )
    assert (status, err) == (0, "")
    assert json.loads(out)["check"]["passed"] is True
    assert json.loads(out)["measured"]["weight_versions"] == [2, 1]
    assert "--backend jax runs only the mlp" in refused(
        capsys, f"run {SMALL} --backend jax --model gpt2"
    )


def test_export_writes_a_folder_and_says_how_to_start(capsys, tmp_path):
    out = tmp_path / "out"
    status, text, err = call(
        capsys,
        f"export zb_v --devices 2 --microbatches 4 --for torchtitan --layers 2,1,1,2 --out {out}",
    )
    assert (status, err) == (0, "")
    assert {path.name for path in out.iterdir()} == {
        "schedule.csv",
        "plan.json",
        "options.txt",
        "check.py",
    }
    assert "simulated: 25\nwith the last stage's I and W as B" in text
    assert "train: torchrun --nproc-per-node 2 -m torchtitan.train --module llama3" in text
    assert f"check: torchrun --nproc-per-node 2 {out}/check.py" in text
    status, text, _ = call(capsys, f"export {SMALL} --out {tmp_path}/torch --layers 5")
    assert (status, text.count("\n")) == (0, 4)
    assert "layers a stage [3, 2]" in text and "torch/train.py" in text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f"export {SMALL} --out new --batches 2", "torch's tables hold one batch"),
        ("export pipedream --devices 2 --microbatches 2 --out new", "updates without a flush"),
        (f"export {SMALL} --out new --for torchtitan", "give `layers`"),
        (f"export {SMALL} --out .", ". already exists: name a new folder"),
        (f"export {SMALL} --out link", "link already exists: name a new folder"),
        (f"export {SMALL} --out file/new", "there is no folder file"),
        (f"run {SMALL} --save file", "--save file exists and is not a folder: name a new one"),
    ],
)
def test_export_leaves_nothing_behind_an_error(capsys, line, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    assert problem in refused(capsys, line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_failed_check_is_status_1(capsys, monkeypatch):
    from pipelab.runtime.stage import CountingStage

    original = CountingStage.divisor
    sums = lambda self, *rest: original(self, *rest) / 4  # noqa: E731
    monkeypatch.setattr(CountingStage, "divisor", sums)
    status, out, err = call(capsys, "run gpipe --devices 2 --microbatches 4")
    assert status == 1
    assert "CHECK FAILED" in out
    assert "CHECK FAILED" in err


def test_json_has_no_infinite_numbers():
    # Was: `Infinity` where a check fails at a nan, which no reader of JSON takes.
    found = as_json({"ratio": float("inf"), "losses": [1.5, float("nan")], "passed": False})
    assert found == '{"ratio": null, "losses": [1.5, null], "passed": false}'


def test_the_module_and_the_script_are_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "pipelab", "validate", "/nowhere"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("pipelab validate: error:")


def test_slices_by_their_number_or_their_lengths(capsys):
    sizes = ["--devices=2", "--microbatches=2", "--costs=attention=0.4", "--json"]
    shares = simulate(
        replace(make("seq1f1b", 2, 2, slices=3), slices=(3, 2, 1)), Costs(attention=0.4)
    )
    even = simulate(make("seq1f1b", 2, 2, slices=3), Costs(attention=0.4))
    for slices, expected in (("3,2,1", shares), ("3", even)):
        main(["simulate", f"seq1f1b,slices={slices}", *sizes])
        assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(expected.makespan)
