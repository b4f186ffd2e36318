"""`masw-train` from end to end on a tiny model: what it writes, resumes, prints and refuses."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from masw.build import samples_command
from masw.build.adaptor.answers import Answerer
from masw.build.adaptor.evaluation import Evaluator
from masw.build.adaptor.run_folder import RunFolder
from masw.build.adaptor.samples import Sample, read_samples, write_samples
from masw.build.adaptor.settings import TrainSettings
from masw.build.train import app
from masw.engines.adaptor import Adaptor, read_adaptor
from masw.engines.decoder import Decoder
from masw.engines.engine_folder import file_sha256
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import random_adaptor
from tests.models import random_ids, save_model
from tests.tiny_tokenizers import byte_level

pytestmark = pytest.mark.usefixtures("one_thread")

MEMORY = ["--sink", "8", "--window", "8", "--lengths", "72", "--dtype", "float32"]
BUDGET = ["--batch-tokens", "144", "--micro-tokens", "72", "--steps", "6", "--save-every", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return byte_level(save_model(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("samples") / "s.jsonl.gz"
    prompts = [random_ids(60, seed) for seed in range(6)]
    write_samples(path, [Sample(ids, ids[:9], "code", 60, str(i)) for i, ids in enumerate(prompts)])
    return path


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(word) for word in arguments])
    assert result.exit_code == code, result.output
    return result


def rows_of(result):
    return json.loads(result.stdout.splitlines()[-1])["rows"]


def stage_of(model, data, out, *more):
    return ["--model", model, "--data", data, "--out", out, *MEMORY, *BUDGET, *more]


def sft(model, samples, out, *more, code=0):
    return call("sft", *stage_of(model, f"samples={samples}", out, *more), code=code)


def log(out):
    lines = (out / "log.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def test_a_run_leaves_an_adaptor_with_provenance(model, samples, tmp_path):
    result = sft(model, samples, tmp_path, "--intervals", "4,8", "--offset")
    written = [tmp_path / f"adaptor-r{r}.safetensors" for r in (4, 8)]
    assert result.stdout.split() == [str(path) for path in written]
    decoder = Decoder.load(model)
    for path, interval in zip(written, (4, 8), strict=True):
        config, tensors = read_adaptor(path)
        assert (config.interval, config.sink, config.trained, config.offset) == (
            interval,
            8,
            True,
            True,
        )
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        Adaptor.load(path, decoder.config, decoder.fingerprint())
    told = json.loads((tmp_path / "provenance.json").read_text())
    assert told["base"] == decoder.fingerprint()
    assert told["tokens_seen"] == 6 * 144 and told["rows"] == {"72": 6}
    assert told["settings"]["steps"] == 6 and told["machine"]["cores"] >= 1
    assert told["data"] == [["samples=s.jsonl.gz", file_sha256(samples)]]
    assert told["stage"] == "sft" and told["ranks"] == 1 and str(tmp_path) not in json.dumps(told)
    assert [step for step, _ in log(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_killed_run_resumes_to_the_same_bytes(model, samples, tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sft(model, samples, whole)
    note = RunFolder.note

    def dies_at_five(folder, report):
        note(folder, report)
        if report.step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "note", dies_at_five)
        assert "the same command resumes" in sft(model, samples, killed, code=130).stderr
    assert not (killed / "adaptor-r8.safetensors").exists()
    assert "resumed at step 4 of 6" in sft(model, samples, killed).stderr
    files = [folder / "adaptor-r8.safetensors" for folder in (whole, killed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert log(whole) == log(killed)


def test_another_run_in_the_same_folder_is_refused(model, samples, tmp_path):
    out, other = tmp_path / "out", tmp_path / samples.name
    sft(model, samples, out)
    adaptor = (out / "adaptor-r8.safetensors").read_bytes()
    write_samples(other, read_samples(samples)[1:])
    begun = out / "adaptor-r8.safetensors"
    for stage, data, more, differ in (
        ("sft", samples, ["--seed", 1], "seed"),
        ("sft", other, [], "data"),
        ("sft", samples, ["--start", begun], "start"),
        ("pretrain", samples, [], "stage"),
    ):
        told = call(stage, *stage_of(model, f"samples={data}", out, *more), code=1).stderr
        assert f"holds a run with other settings or data ({differ})" in told
    assert (out / "adaptor-r8.safetensors").read_bytes() == adaptor


def test_ranks_but_the_first_write_nothing_and_still_compare(tmp_path):
    out, idle = tmp_path / "out", SimpleNamespace(step=0)
    RunFolder(out, TrainSettings(), {"data": "one"}, writes=False).resume(idle)
    assert not out.exists()
    first = RunFolder(out, TrainSettings(), {"data": "one"})
    with first.held():
        first.resume(idle)
    first.state.touch()
    with pytest.raises(ValueError, match=r"other settings or data \(data\)"):
        RunFolder(out, TrainSettings(), {"data": "other"}, writes=False)


def test_a_folder_in_which_another_process_trains_is_refused(model, samples, tmp_path):
    with RunFolder(tmp_path, TrainSettings(), {}).held():
        told = sft(model, samples, tmp_path, code=1).stderr
    assert "is in use: the same command runs already" in told
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("name", ["adaptor-r4.safetensors", "provenance.json"])
def test_a_folder_with_results_of_no_run_is_left_as_it_is(model, samples, tmp_path, name):
    (tmp_path / name).write_text("precious")
    told = sft(model, samples, tmp_path, code=1).stderr
    assert f"holds {name} of no run; give another --out" in told
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_what_is_no_run_is_named(model, samples, tmp_path):
    (tmp_path / "file").touch()
    assert "file is no folder" in sft(model, samples, tmp_path / "file", code=1).stderr
    out = tmp_path / "out"
    sft(model, samples, out, "--steps", "1")
    save_file({"x": torch.zeros(1)}, out / "state.safetensors")
    told = sft(model, samples, out, "--steps", "1", code=1).stderr
    assert "state.safetensors is no state of a training run" in told
    (out / "settings.json").write_text("[]")
    assert "other settings or data" in sft(model, samples, out, code=1).stderr
    (out / "settings.json").write_text("{")
    assert "settings.json holds no settings" in sft(model, samples, out, code=1).stderr


def test_a_start_of_other_shapes_is_refused_in_one_line(model, samples, tmp_path):
    sft(model, samples, tmp_path / "first", "--low-rank", "2")
    start = ["--start", tmp_path / "first" / "adaptor-r8.safetensors"]
    told = sft(model, samples, tmp_path / "second", *start, "--low-rank", "3", code=1).stderr
    assert "adaptor-r8.safetensors has layers.0.query" in told and "these settings have (" in told
    assert len(told.splitlines()) == 1
    told = sft(model, samples, tmp_path / "second", *start, code=1).stderr
    assert "these settings have none" in told


def test_training_goes_on_from_an_adaptor(model, samples, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    sft(model, samples, first)
    sft(model, samples, second, "--start", first / "adaptor-r8.safetensors", "--offset")
    assert log(second)[0][1] < log(first)[0][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--lengths", "16"], "lengths has 16; no slot is seen before token 23"),
        (["--lengths", "5000"], "lengths has 5000; the model has 1024 positions"),
        (["--loss", "kl-target"], "kl-target needs --target"),
        (["--visibility", "soon"], "soon"),
        (["--data", "books"], "data is 'books'; known: redpajama"),
        (["--target", "m"], "kl-target needs --target, a model folder; no other loss has one"),
        (["--loss", "next-token", "--next-token", "0.5"], "next_token is 0.5; loss next-token has"),
        (["--intervals", "0"], "interval is 0; it must be an integer from 1 up"),
        (["--slot-embedding", "mean"], "slot_embedding is 'mean'; give 'last_token' or a token id"),
        (["--slot-embedding", "999999"], "slot_embedding is 999999; the model has"),
        (["--weight-decay", "inf"], "weight_decay is inf; it must be 0 or more and finite"),
        (["--weight-decay", "-1"], "weight_decay is -1.0; it must be 0 or more and finite"),
        (["--steps", "1" + "0" * 14], "steps is 100000000000000; it must be 1 to 2147483647"),
        (["--seed", "-1"], "seed is -1; it must be 0 to 2147483647"),
        (["--learning-rate", "nan"], "learning_rate is nan; it must be above 0 and finite"),
        (["--dtype", "float16"], "dtype is 'float16'; use one of float32, bfloat16"),
        (["--start", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_step(model, samples, tmp_path, change, message):
    out = tmp_path / "out"
    assert message in sft(model, samples, out, *change, code=1).stderr
    assert not out.exists()


def test_a_refused_first_attempt_leaves_its_folder_to_the_next(model, samples, tmp_path):
    sft(model, samples, tmp_path, "--lengths", "5000", code=1)
    assert "starting at step 0" in sft(model, samples, tmp_path).stderr


def test_pretraining_packs_documents_and_weighs_no_prompt(model, tmp_path):
    (tmp_path / "t.txt").write_text("What was said at the meeting, " * 40)
    arguments = stage_of(model, f"text={tmp_path / 't.txt'}", tmp_path / "out")
    call("pretrain", *arguments)
    assert len(log(tmp_path / "out")) == 6
    told = call("pretrain", *arguments, "--prompt-weight", "0", code=1).stderr
    assert "prompt_weight is for sft" in told


def test_two_ranks_train_what_one_trains(model, samples, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    sft(model, samples, one)
    torchrun = "torch.distributed.run --standalone --nproc-per-node=2 -m masw.build.train sft"
    arguments = map(str, stage_of(model, f"samples={samples}", two))
    result = subprocess.run(
        [sys.executable, "-m", *torchrun.split(), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(two / "adaptor-r8.safetensors")]
    divided, alone = (load_file(folder / "state.safetensors") for folder in (two, one))
    torch.testing.assert_close(divided, alone, atol=1e-5, rtol=0)
    assert json.loads((two / "provenance.json").read_text())["ranks"] == 2
    assert log(two) == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in log(one)]


def test_tensorboard_that_is_not_installed_is_told_first(model, samples, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    told = sft(model, samples, tmp_path, "--tensorboard", code=1).stderr
    assert "pip install tensorboard" in told and "starting" not in told


def test_a_run_learns_from_another_target(model, samples, tmp_path):
    sft(model, samples, tmp_path / "out", "--loss", "kl-target", "--target", model)
    sft(model, samples, tmp_path / "self")
    assert log(tmp_path / "out") == log(tmp_path / "self")
    told = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert told["target"] == told["model"]


def test_answers_are_what_hugging_face_generates(model, hf_model, tmp_path):
    prompts = [Sample(random_ids(n, n), kind="code", prefix=40) for n in (40, 37, 40)]
    write_samples(tmp_path / "p.jsonl", prompts)
    batch = ["--max-tokens", "12", "--batch-size", "2"]
    call("answers", tmp_path / "p.jsonl", tmp_path / "a.jsonl", *batch, "--model", model)
    answered = {sample.prompt: list(sample.answer) for sample in read_samples(tmp_path / "a.jsonl")}
    assert answered.keys() == {sample.prompt for sample in prompts}
    for prompt, answer in answered.items():
        out = hf_model("llama").generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert answer == out[0, len(prompt) :].tolist()


def test_stopped_answers_go_on_with_those_that_are_missing(model, tmp_path, monkeypatch):
    prompts = [Sample(random_ids(n, n), kind="code", prefix=40) for n in (40, 37, 40, 39, 38)]
    write_samples(tmp_path / "p.jsonl", prompts)
    command = ["answers", tmp_path / "p.jsonl", "--batch-size", "2", "--model", model]
    call(*command, tmp_path / "whole.jsonl", "--max-tokens", "12")
    answer, asked = Answerer._answers, []

    def dies_at_the_second_batch(answerer, batch, max_tokens):
        asked.extend(len(sample.prompt) for sample in batch)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answer(answerer, batch, max_tokens)

    monkeypatch.setattr(Answerer, "_answers", dies_at_the_second_batch)
    stopped = call(*command, tmp_path / "a.jsonl", "--max-tokens", "12", code=130).stderr
    assert "the same command resumes" in stopped and not (tmp_path / "a.jsonl").exists()
    other = call(*command, tmp_path / "a.jsonl", "--max-tokens", "13", code=1).stderr
    assert "begun with other settings (max_tokens)" in other
    call(*command, tmp_path / "a.jsonl", "--max-tokens", "12")
    assert asked == [37, 38, 39, 40, 39, 40, 40]
    assert read_samples(tmp_path / "a.jsonl") == read_samples(tmp_path / "whole.jsonl")
    assert not list(tmp_path.glob("*.journal"))


def plain_greedy(model, prompt, tokens):
    """The argmax of every forward over all ids so far, up to the end id."""
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens and (len(ids) == len(prompt) or ids[-1] != 2):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt) :]


def test_answers_are_the_argmax_whatever_the_folder_says_of_generating(hf_model, tmp_path):
    folder = save_model(tmp_path / "m", "llama")
    written = json.loads((folder / "generation_config.json").read_text())
    other = {"repetition_penalty": 1.5, "suppress_tokens": [5], "min_new_tokens": 9, "num_beams": 2}
    (folder / "generation_config.json").write_text(json.dumps(written | other))
    prompts = [Sample(random_ids(n, n)) for n in (12, 15)]
    [answered] = Answerer(folder, torch.float32).run(prompts, 20, 2)
    plain = [plain_greedy(hf_model("llama"), prompt.prompt, 20) for prompt in prompts]
    assert [list(sample.answer) for sample in answered] == plain
    assert any(len(set(answer)) < len(answer) for answer in plain)  # a penalty would tell


def test_answers_refuse_other_types_and_ids(model, tmp_path):
    write_samples(tmp_path / "p.jsonl", [Sample((4, 307), name="n")])
    command = ["answers", tmp_path / "p.jsonl", tmp_path / "a.jsonl", "--model", model]
    refused = call(*command, "--dtype", "fp32", code=2).stderr
    assert "'fp32' is none of float32, bfloat16, float16" in refused
    assert "sample 'n': token id 307 is not of this model" in call(*command, code=1).stderr


def test_refused_prompts_leave_no_journal_to_stumble_over(model, tmp_path):
    command = ["answers", tmp_path / "p.jsonl", tmp_path / "a.jsonl", "--model", model]
    for wrong in ([Sample((4, 307))], [Sample((4,) * 1020)], []):
        write_samples(tmp_path / "p.jsonl", wrong)
        call(*command, "--max-tokens", "5", code=1)
        assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
    write_samples(tmp_path / "p.jsonl", [Sample((4,) * 1019, name="n")])
    refused = call(*command, "--max-tokens", "6", code=1).stderr
    assert "'n': a prompt of 1019 tokens and max_tokens 6; the model takes 1024" in refused
    call(*command, "--max-tokens", "5")
    assert len(read_samples(tmp_path / "a.jsonl")) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["prompts", "out.jsonl"],
        ["answers", "s.jsonl.gz", "out.jsonl"],
        ["evaluate", "s.jsonl.gz"],
        ["pretrain", "--data", "samples=s.jsonl.gz", "--out", "run"],
    ],
)
def test_a_name_that_is_no_model_folder_is_refused_without_asking_a_hub(
    samples, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.jsonl.gz").symlink_to(samples)
    refused = call(*command, "--model", "some/name", code=1).stderr
    assert refused == "masw-train: model is 'some/name'; it must be a folder with a config.json\n"
    assert [path.name for path in tmp_path.iterdir()] == ["s.jsonl.gz"]


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ("0", "prefixes has 0; it must be 1 or more"),
        ("-5", "prefixes has -5; it must be 1 or more"),
        ("500,1025", "prefixes has 1025; the model has 1024 positions"),
        ("100,200,100", "prefixes has 100 twice"),
    ],
)
def test_prefixes_without_sense_are_refused(model, tmp_path, prefixes, message):
    command = ["prompts", tmp_path / "p.jsonl", "--model", model, "--prefixes", prefixes]
    assert message in call(*command, code=1).stderr
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written_are_refused_before_any_work(model, samples, tmp_path):
    for place in (tmp_path, tmp_path / "none" / "x"):
        for command in (
            ["prompts", place, "--model", model],
            ["answers", samples, place, "--model", model],
            ["evaluate", samples, "--model", model, "--json", place],
        ):
            told = " ".join(call(*command, code=2).stderr.replace("│", " ").split())
            assert "give a file in a folder that can be written" in told
    assert not list(tmp_path.iterdir())


def write_meetings(path, count):
    turns = [f"Speaker {i}: " + " ".join("abcde"[(i + j) % 5] for j in range(60)) for i in range(6)]
    queries = [{"query": "who?", "answer": "a"}]
    rows = [
        {"meeting_id": f"m{i}", "transcript": "\n".join([f"A: {i}", *turns]), "queries": queries}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_come_from_code_meetings_and_text(model, tmp_path):
    (tmp_path / "m.py").write_text("x = 1\n" * 400)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" * 400)
    (tmp_path / "t.txt").write_text("a line of text\n" * 400)
    options = ["--code", tmp_path, "--text", tmp_path / "t.txt", "--prefixes", "500,600"]
    options += ["--meetings", write_meetings(tmp_path / "q.jsonl", 1), "--count", "1"]
    told = call("prompts", tmp_path / "p.jsonl", *options, "--model", model).stderr
    assert "left out" in told and "latin.py:1: byte 0xe9" in told and " of 1 " not in told
    found = read_samples(tmp_path / "p.jsonl")
    kinds = [("code", "m.py"), ("summary", "m0"), ("quote", "m0"), ("text", "t.txt")]
    assert [(s.prefix, s.kind, s.name) for s in found] == [
        (prefix, *kind) for prefix in (500, 600) for kind in kinds
    ]
    assert all(sample.prefix - 20 <= len(sample.prompt) <= sample.prefix for sample in found)


def test_fewer_prompts_than_asked_are_told_and_none_is_refused(model, tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text("x = 1\n" * 400)
    meetings = write_meetings(tmp_path / "q.jsonl", 2)
    command = ["prompts", tmp_path / "p.jsonl", "--code", tmp_path, "--meetings", meetings]
    command += ["--model", model, "--prefixes"]
    told = call(*command, "500").stderr
    assert "1 of 8 code prompts of 500 tokens" in told
    assert "2 of 8 summary prompts of 500 tokens" in told
    assert "no summary prompts of 1000 tokens" in call(*command, "1000", code=1).stderr
    (tmp_path / "m.py").write_text("x = 1\n" * 40)
    assert "no code prompts of 500 tokens" in call(*command, "500", code=1).stderr
    (tmp_path / "t.txt").write_text("a long text " * 2000)
    monkeypatch.setattr(samples_command, "standard_library", lambda: [tmp_path / "m.py"])
    command = ["prompts", tmp_path / "p.jsonl", "--text", tmp_path / "t.txt", "--model", model]
    assert "0 of 8 code prompts" in call(*command, "--prefixes", "1000").stderr
    assert [sample.kind for sample in read_samples(tmp_path / "p.jsonl")] == ["text"]


def test_a_code_folder_that_is_not_there_is_named(model, tmp_path):
    command = ["prompts", tmp_path / "p.jsonl", "--code", tmp_path / "none", "--model", model]
    command += ["--prefixes", "500"]
    assert "none; it must be a folder" in call(*command, code=1).stderr


def test_evaluate_prints_a_card_and_one_json_line(model, samples, tmp_path):
    sft(model, samples, tmp_path / "run")
    trained = f"mine={tmp_path / 'run' / 'adaptor-r8.safetensors'}"
    options = ["--model", model, "--adaptor", trained, "--max-tokens", "9", "--swa", "16"]
    options += ["--transferred", "64:64:4"]
    result = call("evaluate", samples, *options, "--json", tmp_path / "e.json")
    told = json.loads(result.stdout.splitlines()[-1])
    assert told == json.loads((tmp_path / "e.json").read_text())
    names = {row["memory"] for row in told["rows"]}
    windows = {"window = r8", "window = r4", "swa-16"}
    slots = {"mine", "mine S64 W64 r4", "untrained W128 r8"}
    assert names == {"full", "snapkv"} | slots | windows
    assert told["settings"]["adaptors"] == {"mine": "adaptor-r8.safetensors"}
    assert all(row["samples"] == 6 and row["tokens"] == 54 for row in told["rows"])
    malformed = call("evaluate", samples, *options, "--transferred", "64:4", code=2)
    assert "give S:W:r, several" in malformed.stderr


def test_a_stopped_evaluation_goes_on_with_samples_that_are_missing(
    model, samples, tmp_path, monkeypatch
):
    options = ["--model", model, "--max-tokens", "9", "--swa", "16"]
    whole = rows_of(call("evaluate", samples, *options))
    kept, run, ran = tmp_path / "outcomes.jsonl", Evaluator.run, []

    def dies_at_the_third(evaluator, family, memories):
        ran.extend(sample.name for sample in family.samples)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return run(evaluator, family, memories)

    monkeypatch.setattr(Evaluator, "run", dies_at_the_third)
    call("evaluate", samples, *options, "--outcomes", kept, code=130)
    kept.write_text(kept.read_text()[:-20])  # the kill fell into the second line
    resumed = rows_of(call("evaluate", samples, *options, "--outcomes", kept))
    assert ran == ["0", "1", "2", "1", "2", "3", "4", "5"]
    assert resumed == whole
    assert rows_of(call("evaluate", samples, *options, "--outcomes", kept)) == whole
    assert len(ran) == 8


@pytest.fixture
def ran(monkeypatch):
    """Names of the memories that ran, in order."""
    names, run = [], Evaluator.run

    def watched(evaluator, family, memories):
        names.extend(memory.name for memory in memories)
        return run(evaluator, family, memories)

    monkeypatch.setattr(Evaluator, "run", watched)
    return names


def test_another_memory_is_all_that_a_larger_evaluation_runs(model, samples, tmp_path, ran):
    options = ["--model", model, "--max-tokens", "9", "--swa", "16"]
    kept = ["--outcomes", tmp_path / "outcomes.jsonl"]
    larger = rows_of(call("evaluate", samples, *options, "--windows", "40"))
    smaller = rows_of(call("evaluate", samples, *options, *kept))
    ran.clear()
    assert rows_of(call("evaluate", samples, *options, *kept, "--windows", "40")) == larger
    assert set(ran) == {"window-40"}
    assert [row for row in larger if row["memory"] != "window-40"] == smaller
    ran.clear()
    call("evaluate", samples, *options, *kept, "--sink", "8")
    assert set(ran) == {"window = r8", "window = r4", "untrained W128 r8"}


def test_kept_outcomes_know_a_memory_by_its_weights_not_its_name(model, samples, tmp_path, ran):
    adaptor = random_adaptor(Decoder.load(model), MemoryRule(8, 16, 16, 4, "evicted"), trained=True)
    adaptor.save(tmp_path / "one.safetensors")
    next(adaptor.parameters()).neg_()
    adaptor.save(tmp_path / "other.safetensors")

    def evaluate(name, file):
        ran.clear()
        options = ["--model", model, "--max-tokens", "9", "--outcomes", tmp_path / "outcomes.jsonl"]
        call("evaluate", samples, *options, "--adaptor", f"{name}={tmp_path / file}")
        return set(ran)

    assert "mine" in evaluate("mine", "one.safetensors")
    assert not evaluate("renamed", "one.safetensors")
    assert evaluate("mine", "other.safetensors") == {"mine"}


def test_one_file_is_not_written_twice(model, samples, tmp_path):
    kept = tmp_path / "o.jsonl"
    command = ["evaluate", samples, "--model", model, "--outcomes", kept]
    refused = call(*command, "--json", tmp_path / "." / "o.jsonl", code=2)
    assert "outcomes and json are both" in refused.stderr
    assert "samples and json" in call(*command, "--json", samples, code=2).stderr
    assert not kept.exists()


def test_names_are_no_markup(model, tmp_path):
    ids = random_ids(69, 1)
    write_samples(tmp_path / "s.jsonl", [Sample(ids[:60], ids[60:], "[/b]", 60)])
    adaptor = random_adaptor(Decoder.load(model), MemoryRule(8, 16, 16, 4, "evicted"), trained=True)
    adaptor.save(tmp_path / "a.safetensors")
    options = ["--model", model, "--adaptor", f"[bold]={tmp_path / 'a.safetensors'}"]
    told = call("evaluate", tmp_path / "s.jsonl", *options).stdout
    assert "[/b] 60" in told and " [bold] " in told


def test_outcomes_of_another_precision_are_refused(model, samples, tmp_path):
    options = ["--model", model, "--max-tokens", "9", "--outcomes", tmp_path / "outcomes.jsonl"]
    call("evaluate", samples, *options, "--no-snapkv", "--per-kind", "1")
    change = ["--dtype", "bfloat16", "--no-distances"]
    refused = call("evaluate", samples, *options, *change, code=1)
    assert "begun with other settings (distances, dtype)" in refused.stderr


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (["--prefixes", "9999"], 1, "prefixes has 9999; the samples have 60 (code)"),
        (["--per-kind", "-1"], 2, "--per-kind"),
        (["--max-tokens", "4"], 1, "sample '0' has an answer of 9 tokens; max_tokens is 4"),
        (["--windows", "40,40"], 1, "2 memories are named 'window-40'"),
        (["--windows", "0"], 1, "windows has 0; it must be 1 to 2147483647"),
        (["--dtype", "fp32"], 2, "none of float32, bfloat16, float16"),
        (["--adaptor", "x.safetensors"], 2, "give NAME=FILE"),
        (["--adaptor", "=x"], 2, "give NAME=FILE"),
        (["--adaptor", "a=x", "--adaptor", "a=y"], 2, "there is another 'a'"),
        (["--adaptor", "windowed=x"], 1, "adaptor 'windowed' is named like another memory"),
        (["--transferred", "8:16:4"], 1, "transferred tries adaptors in other memories"),
        (["--untrained", "8::4"], 2, "give W:r"),
        (["--untrained", "8:-4"], 2, "give W:r"),
        (["--equal", "0"], 1, "equal has 0; it must be 1 to"),
        (["--windows", "1" + "0" * 20], 1, "it must be 1 to 2147483647"),
        (["--draft-tokens", "1025"], 1, "draft_tokens is 1025; it must be 1 to 1024"),
        (["--device", "xpu"], 2, "'xpu' is no device; use cpu or cuda"),
    ],
)
def test_evaluations_that_tell_nothing_are_refused(model, samples, tmp_path, change, code, message):
    kept = tmp_path / "e.json"
    refused = call("evaluate", samples, "--model", model, "--json", kept, *change, code=code)
    assert message in refused.stderr and not refused.stdout and not kept.exists()


def test_an_evaluation_of_no_samples_is_refused(model, tmp_path):
    write_samples(tmp_path / "s.jsonl", [])
    told = call("evaluate", tmp_path / "s.jsonl", "--model", model, code=1).stderr
    assert "there are no samples" in told


def test_the_window_beside_equal_slots_is_an_option(model, samples):
    options = ["--model", model, "--equal", "4", "--sink", "8", "--untrained", "", "--swa", ""]
    rows = rows_of(call("evaluate", samples, *options, "--no-snapkv", "--window", "16"))
    entries = {row["memory"]: row["entries"] for row in rows}
    assert entries == {"full": 60, "window = r4": 8 + 16 + (60 - 8) // 4}


def test_ablation_trains_every_arm_once_and_keeps_results(model, tmp_path):
    ids = [random_ids(320, seed) for seed in range(4)]
    write_samples(tmp_path / "s.jsonl", [Sample(i[:310], i[310:], "code", 310) for i in ids])
    data = f"samples={tmp_path / 's.jsonl'}"
    options = ["--sft-data", data, "--pretrain-data", data, "--groups", "stage,levers"]
    options += ["--lengths", "320", "--batch-tokens", "320", "--micro-tokens", "320"]
    options += ["--steps", "2", "--max-tokens", "10", "--per-kind", "1", "--dtype", "float32"]
    command = ["ablate", tmp_path / "s.jsonl", "--out", tmp_path / "out", "--model", model]
    told = call(*command, *options)
    results = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "out").glob("*.json")}
    assert len(results) == 3 + 6
    for result in results.values():
        assert result["tokens"] == 2 * 320 and len(result["loss"]) == 2
        assert set(result["tok_iter"]) == {"310"}
        assert result["date"] and result["machine"]["cpu"] and result["versions"]["torch"]
    both = results["levers--r_=_8_and_4_in_turn"]["tok_iter"]["310"]
    assert both.keys() == {"r = 8", "r = 4"}
    assert "levers: offset" in told.stderr
    again = call(*command, *options)
    assert "levers: offset\n" not in again.stderr  # nothing is trained a second time
    assert again.stdout == told.stdout
    assert not list((tmp_path / "out").glob("*.part"))
    other = call(*command, *options, "--steps", "3", "--per-kind", "2", code=1)
    assert "stage--PT.json has other samples, steps; give another --out" in other.stderr
    assert not other.stdout and call(*command, *options).stdout == told.stdout
    one = call(*command, *options, "--arms", "offset, plain", "--out", tmp_path / "one")
    assert one.stdout.splitlines() == [
        line
        for line in told.stdout.splitlines()
        if line.startswith(("levers: plain:", "levers: offset:"))
    ]
    unknown = call(*command, *options, "--arms", "x", code=1).stderr
    assert "arms has 'x'; known: PT, SFT, PT + SFT, plain" in unknown
    assert "groups has 'x'" in call(*command, *options[:4], "--groups", "x", code=1).stderr


def test_ablations_of_samples_that_have_no_tok_iter_are_refused(model, samples, tmp_path):
    where = ["--model", model, "--out", tmp_path / "out"]
    data = [f"--{stage}-data=samples={samples}" for stage in ("sft", "pretrain")]
    for change, message in (
        (["--max-tokens", "4"], "sample '0' has an answer of 9 tokens; max_tokens is 4"),
        (["--prefixes", "9999"], "prefixes has 9999; the samples have 60 (code)"),
    ):
        refused = call("ablate", samples, *where, *data, *change, code=1)
        assert message in refused.stderr and not (tmp_path / "out").exists()


def test_ablations_tell_of_data_of_any_arm_before_the_first_is_trained(model, samples, tmp_path):
    write_samples(tmp_path / "none.jsonl", [Sample(random_ids(320, 1))])
    write_samples(tmp_path / "one.jsonl", [Sample(random_ids(320, 1)), Sample((4,) * 300, (5,))])
    command = ["ablate", samples, "--model", model, "--out", tmp_path / "out", "--groups", "stage"]
    command += ["--pretrain-data", f"samples={tmp_path / 'none.jsonl'}", "--lengths", "320"]
    tuning = ["--sft-data", f"samples={tmp_path / 'none.jsonl'}"]
    refused = call(*command, *tuning, code=1).stderr
    assert refused.endswith("none of its 1 samples has an answer\n")
    assert "stage: PT" not in refused and not (tmp_path / "out").exists()
    budget = ["--batch-tokens", "320", "--micro-tokens", "320", "--steps", "1", "--per-kind", "1"]
    told = call(*command, "--sft-data", f"samples={tmp_path / 'one.jsonl'}", *budget).stderr
    assert "skipped 1 of 2 samples, without answers" in told


def test_plots_are_drawn_from_results(model, samples, tmp_path):
    ids = [random_ids(320, seed) for seed in range(2)]
    write_samples(tmp_path / "s.jsonl", [Sample(i[:310], i[310:], "code", 310) for i in ids])
    data, results = f"samples={tmp_path / 's.jsonl'}", tmp_path / "results"
    results.mkdir()
    options = ["--max-tokens", "10", "--model", model]
    call("evaluate", tmp_path / "s.jsonl", *options, "--json", results / "evaluate.json")
    options += ["--sft-data", data, "--pretrain-data", data, "--groups", "initialisation,stage"]
    options += ["--lengths", "320", "--batch-tokens", "320", "--micro-tokens", "320"]
    options += ["--steps", "2", "--dtype", "float32", "--out", results / "ablations"]
    call("ablate", tmp_path / "s.jsonl", *options)
    drawn = call("plot", results, tmp_path / "png").stdout.split()
    names = {"initialisation.png", "stage.png", "frontier-310-2.png", "distance.png"}
    assert {path.rsplit("/", 1)[1] for path in drawn} == names
    for path in (tmp_path / "png").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
    stored = results / "ablations" / "stage--PT.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"tok_iter": {}}))
    refused = call("plot", results, tmp_path / "none", code=1)
    assert "stage--PT.json has no tok_iter" in refused.stderr
    stored.write_text("[]")
    assert "stage--PT.json has no group" in call("plot", results, tmp_path / "none", code=1).stderr
    for empty in (tmp_path / "png", tmp_path / "s.jsonl", tmp_path / "nowhere"):
        refused = call("plot", empty, tmp_path / "none", code=1)
        assert "has neither evaluate*.json nor ablations/*.json" in refused.stderr
    assert not (tmp_path / "none").exists()
