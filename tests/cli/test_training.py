"""Text as batches; long trainings in parts: stopped or killed at any moment, they go on."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from socket import gethostname

import pytest
import torch

import pipelab
from pipelab import Trainer, make, run
from pipelab.cli import main, training
from pipelab.cli.training import LOCK, TrainingFolder
from pipelab.models import data, split
from pipelab.models.gpt2 import PADDING, gpt2, masked_loss, next_token_loss
from pipelab.runtime.torch.checkpoint import Index, load_stage
from tests.cli.test_cli import SMALL, refused
from tests.conftest import thorough
from tests.support import PYTHON

ROOT = Path(pipelab.__file__).parent.parent

# ---- data


def test_byte_pairs_write_any_text():
    corpus = data.corpus(512)
    assert len(corpus.vocabulary) == 512 and corpus.tokens.max() < 512
    assert (
        corpus.tokenizer.decode(corpus.tokens[:200].tolist())
        == data.text()[: len(corpus.tokenizer.decode(corpus.tokens[:200].tolist()))]
    )
    other = "Überraschung: 漢字 \x00!"
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(other).ids) == other
    assert len(corpus.tokens) < 0.6 * len(data.text()) and data.corpus(512) is corpus


def test_padding_is_not_counted():
    ((x, y),) = data.padded([[5, 6, 7], [8]], count=1, size=3, length=3)
    assert x.tolist() == [[5, 6, 7], [8, 0, 0], [5, 6, 7]]
    assert y.tolist() == [[6, 7, 0], [0, PADDING, PADDING], [6, 7, 0]]
    logits = torch.randn(3, 3, 9)
    mean, count = masked_loss(logits, y)
    kept = y.flatten() != PADDING
    assert count == 7
    assert torch.allclose(
        mean, next_token_loss(logits[None].reshape(1, 9, 9)[:, kept], y.flatten()[kept][None])
    )
    empty, none = masked_loss(logits, torch.full_like(y, PADDING))
    assert (float(empty), int(none)) == (0, 0)
    with pytest.raises(ValueError, match="no texts"):
        data.padded([], 1, 1, 1)


def test_micro_batches_count_by_their_tokens():
    """Texts of unequal lengths: the mean is over all tokens of the batch, whatever the cut."""
    torch.manual_seed(0)
    texts = [list(range(1, 1 + n)) for n in (1, 2, 3, 9, 14, 15, 2, 1)]
    batches = data.padded(texts, count=2, size=8, length=16)
    stages = split(gpt2(vocabulary=32, length=16, width=16, blocks=2), [2, 2])
    optimizer = partial(torch.optim.Adam, lr=1e-3)
    runs = [
        run(make("pipedream_flush", 2, m, batches=2), stages, batches, masked_loss, optimizer)
        for m in (1, 4)
    ]
    assert all(r.check.passed for r in runs)
    assert runs[0].losses == pytest.approx(runs[1].losses)


def test_a_tied_embedding_is_exchanged():
    """One weight in two stages: its gradients are added up, as in the undivided model."""
    torch.manual_seed(0)
    layers = gpt2(vocabulary=64, length=8, width=16, blocks=2, tied=True)
    assert layers[0].word.weight is layers[-1].project.weight
    stages = split(layers, [2, 2])
    batches = data.batches(torch.randint(64, (500,)), 3, 8, 8)
    result = run(
        make("pipedream_flush", 2, 4, batches=3),
        stages,
        batches,
        next_token_loss,
        partial(torch.optim.SGD, lr=0.1),
    )
    assert result.check.passed
    first, last = result.weights
    assert torch.equal(first["0.word.weight"], last["1.project.weight"])


def test_without_a_hub_one_line_says_so_at_once(monkeypatch, capsys, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    missing = str(tmp_path / "nowhere")
    message = refused(capsys, f"train gpt2 --steps 2 --pretrained {missing}")
    assert f"cannot load {missing!r}: it is not a folder with a saved model" in message
    assert "no hub answers at http://127.0.0.1:9" in message
    assert not constants.HF_HUB_OFFLINE


# ---- parts


def setting(batches=6, name="pipedream_flush"):
    torch.manual_seed(0)
    stages = split(gpt2(vocabulary=64, length=8, width=16, blocks=2, dropout=0.1), [2, 2])
    tokens = torch.randint(64, (500,), generator=torch.Generator().manual_seed(1))
    table = make(name, 2, 2, batches=batches)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return table, stages, data.batches(tokens, batches, 4, 8), next_token_loss, optimizer


def train(table, stages, batches, loss, optimizer, folder, *, every=10, name="", **options):
    """The steps of each part, once it is saved."""
    trainer = partial(Trainer, table, stages, loss, optimizer, **options)
    return training.train(trainer, batches, TrainingFolder(folder, name), every)


def ends(parts):
    return [part[-1].number for part in parts]


def losses_in(folder):
    return json.loads((folder / "losses.json").read_text())["losses"]


@cache
def undivided(name="pipedream_flush"):
    found = run(*setting(name=name), seed=3)
    assert found.check.passed
    return found


def check_equal(folder, name="pipedream_flush"):
    """The losses and weights in the folder are those of one run."""
    whole = undivided(name)
    assert losses_in(folder) == whole.losses
    last = folder / f"step_{len(whole.losses):06}"
    for s, weights in enumerate(whole.weights):
        kept = load_stage(last, s, Index.read(last)).newest()
        assert weights and all(torch.equal(weights[name], kept[name]) for name in weights)


@pytest.mark.parametrize("name", ["pipedream_flush", "pipedream", "pipedream_2bw"])
def test_parts_are_the_whole(name, tmp_path):
    _, *given = setting()
    parts = list(train(make(name, 2, 2), *given, tmp_path / "t", every=4, seed=3))
    assert ends(parts) == [4, 6]
    assert [bool(step.check) for part in parts for step in part] == [True] + 5 * [False]
    assert parts[0][0].check.passed
    check_equal(tmp_path / "t", name)
    left = sorted(p.name for p in (tmp_path / "t").iterdir())
    assert left == ["losses.json", "step_000006"]
    with pytest.raises(ValueError, match="holds a training of 6 batches: nothing is left to do"):
        next(train(*setting(), tmp_path / "t", seed=3))


def test_a_part_that_fails_costs_only_itself(tmp_path):
    table, stages, batches, loss, optimizer = setting()
    broken = [*batches[:4], (batches[4][0] * 1000, batches[4][1]), batches[5]]  # no such token
    parts = train(table, stages, broken, loss, optimizer, tmp_path, every=2, seed=3)
    with pytest.raises(Exception, match="index out of range"):
        list(parts)
    after = list(train(table, stages, batches, loss, optimizer, tmp_path, every=2, seed=3))
    assert ends(after) == [6]
    check_equal(tmp_path)


def test_killed_before_its_losses_were_written(tmp_path, monkeypatch):
    """A checkpoint is there, and its losses are not: the part is run again, and nothing is left."""
    record = TrainingFolder._record

    def killed(folder):
        if len(folder.losses) == 4:
            raise KeyboardInterrupt
        record(folder)

    with monkeypatch.context() as dying:
        dying.setattr(TrainingFolder, "_record", killed)
        with pytest.raises(KeyboardInterrupt):
            list(train(*setting(), tmp_path, every=2, seed=3))
    (tmp_path / ".step_000004.0123abcd.draft").mkdir()
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000004"]
    list(train(*setting(), tmp_path, every=2, seed=3))
    check_equal(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.json", "step_000006"]


# ---- the folder


def shot(folder):
    """Every path in it, with a file's content and a link's goal."""
    return {
        path.relative_to(folder): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def refuse_to_train(output, target):
    raise AssertionError("trained")


def foreign(folder, name, kind):
    """What a training has not written, though it has the name of a checkpoint."""
    path = folder / name
    if kind == "link":
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere" / "model.bin").write_text("x")
        path.symlink_to("elsewhere")
    elif kind == "checkpoint":
        run(*setting(), seed=3, save=path, stop=4, check=False)
    else:
        path.mkdir()
        (path / "model.bin").write_text("x")


def test_a_training_removes_only_what_it_wrote(tmp_path):
    # Was: every folder named like a checkpoint was removed.
    parts = train(*setting(), tmp_path, every=2, seed=3, check=False)
    next(parts)
    shutil.copytree(tmp_path / "step_000002", tmp_path / "step_000003")
    parts.close()
    foreign(tmp_path, "step_000777", "folder")
    foreign(tmp_path, ".step_000004.draft", "folder")
    foreign(tmp_path, "step_000100", "checkpoint")
    foreign(tmp_path, "step_000555", "link")
    own = ("losses.json", "step_000002")
    before = {path: held for path, held in shot(tmp_path).items() if path.parts[0] not in own}
    list(train(*setting(), tmp_path, every=2, seed=3, check=False))
    check_equal(tmp_path)
    own = ("losses.json", "step_000006")
    after = shot(tmp_path)
    assert {path: held for path, held in after.items() if path.parts[0] not in own} == before
    assert {path.parts[0] for path in after} - {path.parts[0] for path in before} == {*own}


def test_a_checkpoint_with_something_of_the_callers_is_kept(tmp_path):
    # Was: it was removed with all that was in it.
    parts = train(*setting(), tmp_path, every=2, seed=3, check=False)
    next(parts)
    (tmp_path / "step_000002" / "notes").write_text("mine")
    assert ends(parts) == [4, 6]
    assert (tmp_path / "step_000002" / "notes").read_text() == "mine"
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == ["step_000002", "step_000006"]


@pytest.mark.parametrize("kind", ["folder", "checkpoint", "link"])
def test_a_checkpoint_replaces_nothing(kind, tmp_path):
    foreign(tmp_path, "step_000004", kind)
    before = shot(tmp_path)
    table, stages, batches, _, optimizer = setting()
    parts = train(table, stages, batches, refuse_to_train, optimizer, tmp_path, every=2, seed=3)
    with pytest.raises(ValueError, match="step_000004 is not a checkpoint of this training"):
        next(parts)
    assert shot(tmp_path) == before


def test_one_training_at_a_time_has_a_folder(tmp_path):
    # Was: two trained, and one of them failed with "No such file".
    folder = tmp_path / 'it\'s "a folder" $x$'
    parts = train(*setting(), folder, every=4, seed=3, check=False)
    next(parts)
    here = f"process {os.getpid()} on {gethostname()}: wait for it"
    for name in ("", "of another name"):
        with pytest.raises(ValueError, match=f"is used by another training, {here}"):
            next(train(*setting(), folder, every=2, seed=4, name=name))
    assert ends(parts) == [6]
    assert sorted(os.listdir(folder)) == ["losses.json", "step_000006"]


def test_a_lock_whose_process_was_killed_is_taken_over(tmp_path, monkeypatch):
    (tmp_path / LOCK).write_text("process 1 on another")
    parts = train(*setting(), tmp_path, every=4, seed=3, check=False)
    next(parts)
    assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {gethostname()}"
    parts.close()
    assert not (tmp_path / LOCK).exists()

    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(training, "flock", no_locks)
    (tmp_path / LOCK).write_text("process 1 on another")
    with pytest.raises(
        ValueError, match=r"process 1 on another \(if it has ended, remove .*lock\)"
    ):
        next(train(*setting(), tmp_path, every=4, seed=3))
    (tmp_path / LOCK).unlink()
    assert len(list(train(*setting(), tmp_path, every=4, seed=3, check=False))) == 1


@pytest.mark.parametrize("point", range(10))
def test_a_full_disk_costs_one_part(point, tmp_path, monkeypatch):
    """The disk is full at one of the writes of two parts, in the middle of a file."""
    left = [point]

    def until_full(write):
        def writes(path, content):
            left[0] -= 1
            if left[0] < 0:
                write(path, content[: len(content) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(path, content)

        return writes

    folder = tmp_path / "new" / "t"
    with monkeypatch.context() as full:
        for name in ("write_bytes", "write_text"):
            full.setattr(Path, name, until_full(getattr(Path, name)))
        with pytest.raises(
            OSError, match=r"/t/(.pipelab.lock|losses|step_00000[36]).* No space left on device"
        ):
            list(train(*setting(), folder, every=3, seed=3, check=False))
    assert not [*tmp_path.rglob("*.draft"), *tmp_path.rglob("*.lock")]
    assert (tmp_path / "new").exists() == (point >= 5)
    after = list(train(*setting(), folder, every=3, seed=3, check=False))
    assert ends(after) == [3, 6][point >= 6 :]
    check_equal(folder)
    assert sorted(os.listdir(folder)) == ["losses.json", "step_000006"]


def test_killed_while_it_removes_a_checkpoint(tmp_path, monkeypatch):
    def killed(path):
        (path / "checkpoint.json").unlink()
        raise KeyboardInterrupt

    parts = train(*setting(), tmp_path, every=2, seed=3, check=False)
    next(parts)
    with monkeypatch.context() as dying:
        dying.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            next(parts)
    assert len(list(train(*setting(), tmp_path, every=2, seed=3, check=False))) == 1
    assert sorted(os.listdir(tmp_path)) == ["losses.json", "step_000006"]


@pytest.mark.parametrize(
    "record",
    [
        *("", "{}", "[]", "5", "\xff", "[" * 100_000, '{"name": "", "losses": 3}'),
        *('{"name": "", "losses": ["x"]}', '{"name": "", "losses": [1], "kept": "*"}'),
        *('{"name": "", "losses": [NaN]}', '{"name": "", "losses": "12"}'),
        '{"name": "", "losses": {"1": 2}}',
    ],
)
def test_a_damaged_record_is_one_error(record, tmp_path):
    # Was: KeyError, TypeError, or JSON's words without the file's name.
    (tmp_path / "losses.json").write_text(record, encoding="latin-1")
    with pytest.raises(
        ValueError, match=r"losses.json is not the record of a training \(.*move it"
    ):
        next(train(*setting(), tmp_path))
    assert os.listdir(tmp_path) == ["losses.json"]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([1.0] * 3, "step_000003 does not hold a checkpoint"),
        ([1.0] * 4, "is after batch 2, .* 4 losses"),
    ],
)
def test_a_record_without_its_checkpoint_is_one_error(losses, message, tmp_path):
    run(*setting(), seed=3, save=tmp_path / "step_000004", stop=2, check=False)
    (tmp_path / "losses.json").write_text(json.dumps({"name": "", "losses": losses}))
    before = shot(tmp_path)
    with pytest.raises(ValueError, match=message):
        next(train(*setting(), tmp_path, every=4))
    assert shot(tmp_path) == before


# ---- the command line

COMMAND = ["train", "gpt2", "--devices", "2", "--microbatches", "2", "--batch", "4", "--steps", "9"]


def state_of(folder):
    index = Index.read(folder)
    return [load_stage(folder, s, index).values() for s in range(len(index.digests))]


@pytest.mark.parametrize("tied", [[], ["--tied", "--clip", "1"]])
def test_train_prints_what_it_does(capsys, tied):
    assert main([*COMMAND, "--steps", "3", *tied, "--json", "--length", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 3 and len(found["losses"]) == 3 and found["check"]["passed"]
    assert found["tokens_per_second"] > 0 and len(found["memory"]) == 2
    assert set(found["bubble"]) == {"of_total", "over_ideal", "of_span"}


@pytest.mark.parametrize("kills", [[2], *thorough(([1, 3],))])
def test_killed_at_any_step_it_goes_on(kills, tmp_path, capsys):
    command = [*COMMAND, "--every", "2", "--dropout", "0.1", "--length", "8"]
    assert main([*command, "--save", str(tmp_path / "whole"), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    killed = tmp_path / "killed"
    for steps in kills:  # killed as soon as so many checkpoints more have been written
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelab", *command, "--save", str(killed)],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        before, deadline = set(), time.monotonic() + 60
        while len(before) < steps and time.monotonic() < deadline:
            before |= {p.parent.name for p in killed.glob("step_*/checkpoint.json")}
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert before
    status = main([*command, "--save", str(killed), "--json"])  # 2: it had been done
    assert status == 2 or json.loads(capsys.readouterr().out)["losses"] == whole["losses"]
    assert json.loads((killed / "losses.json").read_text())["losses"] == whole["losses"]
    last = "step_000009"
    assert sorted(os.listdir(killed)) == sorted(os.listdir(tmp_path / "whole"))
    for a, b in zip(state_of(tmp_path / "whole" / last), state_of(killed / last), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("options", [["--device", "cuda:7"], ["--batch", "1"]])
def test_a_training_that_cannot_be_touches_nothing(options, tmp_path, capsys):
    # Was: the folder was emptied first.
    foreign(tmp_path, "step_000777", "folder")
    before = shot(tmp_path)
    for folder in (tmp_path, tmp_path / "new" / "deep"):
        assert main([*COMMAND, *options, "--save", str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert shot(tmp_path) == before and os.listdir(tmp_path) == ["step_000777"]


def test_kill_leaves_what_can_be_gone_on_with_and_nothing_else(tmp_path, short_path):
    """Also where Ctrl-C is ignored, as for what a script starts in the background."""
    command = [*COMMAND[:-1], "200", "--every", "1", "--length", "8", "--backend", "processes"]
    places = {"TMPDIR": short_path, "TORCHINDUCTOR_CACHE_DIR": tmp_path / "torch's"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelab", *command, "--save", "R"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | {k: str(v) for k, v in places.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout.readline().startswith("step     1")
    process.terminate()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "pipelab train: interrupted\n")
    assert os.listdir(short_path) == []
    done = len(json.loads((tmp_path / "R" / "losses.json").read_text())["losses"])
    assert sorted(os.listdir(tmp_path / "R")) == ["losses.json", f"step_{done:06}"]


CALLS = """
import sys
from pipelab.cli import main
assert [main(line.split()) for line in sys.argv[1:]] == [0, 0, 2, 0]
"""


def test_train_under_torchrun(tmp_path, capsys):
    """Two ranks train two steps, then four: as threads that do it in one go."""
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script, threads, ranks = (tmp_path / name for name in ("calls.py", "threads", "ranks"))
    script.write_text(CALLS)
    command = " ".join(COMMAND).replace(
        "--steps 9", "--steps 4 --every 1 --length 8 --json --save "
    )
    assert main(f"{command}{threads}".split()) == 0
    whole = json.loads(capsys.readouterr().out)
    short = command.replace("--steps 4", "--steps 2")
    lines = [f"{short}{ranks}", f"{command}{ranks}", f"{command}{threads}"]
    lines.append(short.replace("--every 1", "").replace("--save ", ""))  # nothing is saved
    # While another training has a folder, both say so.
    with TrainingFolder(threads, "") as other:
        assert "holds another training" in str(other.take(1, 5))
        done = subprocess.run([*torchrun, script, *lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is used by another training, process") == 2
    two, four, unsaved = done.stdout.splitlines()
    assert json.loads(two)["losses"] == whole["losses"][:2]
    assert json.loads(four)["losses"] == whole["losses"]
    assert json.loads(unsaved)["losses"] == whole["losses"][:2]


def test_another_training_is_not_gone_on_with(tmp_path, capsys):
    command = [*COMMAND, "--length", "8", "--save", str(tmp_path / "t"), "--steps"]
    assert main([*command, "1"]) == 0
    assert main([*command, "12", "--seed", "7"]) == 2
    assert "holds another training (schedule=pipedream_flush devices=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lr inf", "'inf': give a finite number above 0"),
        ("--schedule what", "unknown schedule 'what'"),
        ("--schedule pipedream --tied", "share the weight"),
        ("--length 100", "--length 100: this model has 32 positions"),
        ("--save=", "--save '': give the name of a folder"),
        ("--save /proc/x/y", "--save /proc/x/y: cannot write in /proc"),
        ("--batch 1", "--batch 1: give at least 4, one a micro-batch"),
        ("--device bogus", "device 'bogus'"),
    ],
)
def test_what_does_not_fit_is_found_as_training_begins(capsys, options, message):
    told = refused(capsys, f"train gpt2 --steps 2 {options}")
    assert message in told and "\r" not in told


def test_a_folder_of_a_language_model(monkeypatch, capsys, tmp_path):
    """Trained, gone on with and run; a config alone has random weights; saved ones are loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
    heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "config")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    line = ["--batch", "4", "--every", "1", "--save", str(tmp_path / "kept"), "--json"]
    losses = []
    for steps in ("1", "2"):
        assert main(["train", str(tmp_path / "config"), *line, "--steps", steps]) == 0
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[1][:1] == losses[0] and len(losses[1]) == 2
    assert main(["train", str(tmp_path / "model"), *line, "--steps", "3"]) == 2  # another one's
    capsys.readouterr()
    run = ["run", "gpipe", "--devices", "2", "--microbatches", "2", "--json", "--model"]
    found = []
    for seed in ("0", "1"):  # of the data alone
        assert main([*run, str(tmp_path / "model"), "--seed", seed]) == 0
        found.append(json.loads(capsys.readouterr().out)["losses"])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train gtp2", "model 'gtp2': give gpt2, or a folder with a causal language model"),
        (f"run {SMALL} --model no", "(run and compare: mlp, too)"),
        (f"run {SMALL} --model {{folder}} --dropout 0.1", "has its own"),
        ("train {folder} --tied", "--tied is for gpt2: the config in"),
        ("train {folder} --length 65", "--length 65: this model has 64 positions"),
        (f"run {SMALL} --model {{small}}", "so its vocabulary of 64 must"),
    ],
)
def test_a_folder_that_does_not_fit(line, said, capsys, tmp_path):
    from transformers import GPT2Config

    for name, vocabulary in (("folder", 300), ("small", 64)):
        sizes = dict(vocab_size=vocabulary, n_positions=64, n_embd=32, n_layer=2, n_head=4)
        config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
        config.architectures = ["GPT2LMHeadModel"]
        config.save_pretrained(tmp_path / name)
    line = line.format(folder=tmp_path / "folder", small=tmp_path / "small")
    assert said in refused(capsys, line)


@pytest.mark.parametrize("name", ["losses.json", LOCK, "step_000002/checkpoint.json"])
def test_a_pipe_in_the_folder_is_not_waited_for(name, tmp_path):
    next(train(*setting(), tmp_path, every=2, seed=3, check=False))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"(is|it is) not a file"):
        next(train(*setting(), tmp_path, every=2, seed=3, check=False))
