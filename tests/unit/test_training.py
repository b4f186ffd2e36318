"""Training: what learns, what stays, and that a resumed or divided run is the same run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from masw.build.adaptor.rows import Rows, packed_rows, sample_rows
from masw.build.adaptor.samples import DataError, Sample
from masw.build.adaptor.schedule import Schedule
from masw.build.adaptor.settings import TrainSettings
from masw.build.adaptor.stream import causal_attention, stream_block
from masw.build.adaptor.training import Ranks, Trainer
from masw.engines.decoder import Decoder
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import VOCAB, random_ids, save_model
from tests.oracle import recompute

SETTINGS = TrainSettings(
    sink=8,
    window=8,
    intervals=(4,),
    lengths=(64,),
    batch_tokens=256,
    micro_tokens=128,
    steps=6,
    warmup=2,
    learning_rate=1e-2,
    dtype="float32",
)


def some_rows(count=8, length=64):
    ids = np.array([random_ids(length, seed) for seed in range(count)], np.int32)
    weight = np.ones((count, length), np.float32)
    weight[:, -1] = 0
    return [Rows(ids, weight)]


def new_trainer(decoder, settings=SETTINGS, rows=None, **context):
    schedule = Schedule(rows or some_rows(), settings)
    return Trainer(decoder, settings.new_adaptor(decoder), schedule, **context)


def weights(trainer):
    return {name: t.clone() for name, t in trainer.adaptor.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_loss_is_the_divergence_that_recompute_gives(decoder, hf_model, name):
    """Against Hugging Face's modules under the dense mask: KL to its own full forward."""
    trainer = new_trainer(decoder(name))
    [ids] = some_rows(1)[0].ids.tolist()
    weight = torch.rand(1, 64)
    found = trainer.loss(torch.tensor([ids]), weight, 4)
    student = recompute(hf_model(name), SETTINGS.rule(4), ids, trainer.adaptor).logits
    full = hf_model(name)(torch.tensor([ids])).logits[0]
    each = F.kl_div(
        student.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    expected = (each[:-1] * weight[0, :-1]).sum()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_next_token_and_divergence_mix(decoder, share):
    """The share of the next-token loss interpolates between the two losses."""
    ids, weight = torch.tensor(some_rows(2)[0].ids).long(), torch.ones(2, 64)

    def loss(**changes):
        trainer = new_trainer(decoder("llama"), replace(SETTINGS, **changes))
        return trainer.loss(ids, weight, 4).item()

    next_token, divergence = loss(loss="next-token"), loss()
    mixed = loss(next_token=share)
    assert mixed == pytest.approx(share * next_token + (1 - share) * divergence, rel=1e-5)


def test_another_target_teaches(decoder):
    settings = replace(SETTINGS, loss="kl-target")
    teacher = decoder("llama-llama3")
    ids, weight = torch.tensor(some_rows(1)[0].ids).long(), torch.ones(1, 64)
    trainer = new_trainer(decoder("llama"), settings, teacher=teacher)
    own = new_trainer(decoder("llama"))
    assert trainer.loss(ids, weight, 4) > own.loss(ids, weight, 4)
    with pytest.raises(ValueError, match="do not go together"):
        new_trainer(decoder("llama"), settings)


def test_a_target_of_another_vocabulary_is_refused(decoder, tmp_path):
    other = Decoder.load(save_model(tmp_path, "llama", vocab_size=VOCAB + 1))
    with pytest.raises(ValueError, match=f"{VOCAB + 1} token ids.*same vocabulary"):
        new_trainer(decoder("llama"), replace(SETTINGS, loss="kl-target"), teacher=other)


def test_only_the_adaptor_learns(model_dir):
    """The loss falls; the backbone's weights and logits without slots keep every bit."""
    decoder = Decoder.load(model_dir("llama"))
    before = {name: t.clone() for name, t in decoder.state_dict().items()}
    ids = torch.tensor([random_ids(40)])
    block = stream_block(MemoryRule.full(40), ids)
    logits = decoder.logits(decoder.run(block, causal_attention)[0])
    trainer = new_trainer(decoder, replace(SETTINGS, steps=30, offset=True, low_rank=2))
    start = weights(trainer)
    reports = list(trainer.run())
    assert reports[-1].loss < 0.9 * reports[0].loss
    assert all(parameter.grad is None for parameter in decoder.parameters())
    assert same(before, decoder.state_dict())
    assert torch.equal(decoder.logits(decoder.run(block, causal_attention)[0]), logits)
    after = weights(trainer)
    unmoved = {name for name in start if torch.equal(start[name], after[name])}
    last = f"layers.{decoder.config.layers - 1}"  # where a slot's own output goes nowhere
    assert unmoved <= {f"{last}.{part}.{i}.weight" for part in ("query", "output") for i in (0, 1)}


def test_micro_batches_and_recomputation_change_nothing(decoder):
    def trained(**changes):
        trainer = new_trainer(decoder("llama"), replace(SETTINGS, steps=2, **changes))
        list(trainer.run())
        return weights(trainer)

    expected = trained(micro_tokens=256)
    for found in (trained(micro_tokens=64), trained(recompute=True)):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("intervals", [(4,), (4, 2)])
def test_a_resumed_run_gives_the_same_weights(decoder, tmp_path, intervals):
    settings = replace(SETTINGS, intervals=intervals)
    whole = new_trainer(decoder("llama"), settings)
    reports = list(whole.run())
    killed = new_trainer(decoder("llama"), settings)
    for report in killed.run():
        if report.step == 3:
            killed.save_state(tmp_path / "state.safetensors")
        if report.step == 5:  # two steps that are lost
            break
    resumed = new_trainer(decoder("llama"), settings)
    resumed.load_state(tmp_path / "state.safetensors")
    again = list(resumed.run())
    assert [r.loss for r in again] == [r.loss for r in reports[3:]]
    assert same(weights(whole), weights(resumed))


def test_weights_that_are_not_finite_are_never_kept(decoder, tmp_path):
    trainer = new_trainer(decoder("llama"))
    trainer.save_state(tmp_path / "state")
    kept = (tmp_path / "state").read_bytes()
    with torch.no_grad():
        trainer.parameters[-1].view(-1)[-1] = torch.inf
    with pytest.raises(FloatingPointError, match="step 0 left weights that are not finite"):
        trainer.save_state(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == kept


def test_every_rank_has_a_cuda_device_of_its_own_before_it_joins(monkeypatch):
    """What torchrun states decides: NCCL refuses two ranks on one device."""
    calls = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    assert Ranks.device("cpu") == torch.device("cpu")
    assert Ranks.device("cuda:0") == torch.device("cuda:0")
    with Ranks.joined(Ranks.device("cuda")) as ranks:
        assert ranks == Ranks(1, 2)
    assert calls == ["cuda:1", "nccl", "barrier", "left"]


def test_random_initialisation_is_random_and_seeded(decoder):
    def start(**changes):
        return replace(SETTINGS, **changes).new_adaptor(decoder("llama")).state_dict()

    copy, once = start(), start(initialisation="random", seed=3)
    assert same(once, start(initialisation="random", seed=3))
    assert not same(once, start(initialisation="random", seed=4))
    assert not same(once, copy)
    own = decoder("llama").layers[0].self_attn.k_proj.weight
    assert torch.equal(copy["layers.0.k_proj.weight"], own)


def test_packing_keeps_every_token_and_ends_documents():
    rows = packed_rows([[5, 6, 7], [8, 9], [10, 11, 12, 13]], length=4, end_id=2)
    assert rows.ids.tolist() == [[5, 6, 7, 2], [8, 9, 2, 10], [11, 12, 13, 2]]
    assert rows.weight.tolist() == [[1, 1, 1, 0]] * 3
    with pytest.raises(DataError, match="3 tokens; a row of 4"):
        packed_rows([[5, 6]], length=4, end_id=2)


def test_tuning_rows_weigh_prompt_and_answer():
    samples = [Sample((4, 5, 6), (7, 8)), Sample(tuple(range(20, 30)), (9,))]
    short, long = sample_rows(samples, (6, 8), end_id=2, prompt_weight=0.25)
    assert short.ids.tolist() == [[4, 5, 6, 7, 8, 2]]
    assert short.weight.tolist() == [[0.25, 0.25, 1, 1, 0, 0]]
    assert long.ids.tolist() == [[23, 24, 25, 26, 27, 28, 29, 9]]  # the prompt's start is cut
    assert long.weight.tolist() == [[0.25] * 6 + [1, 0]]
    with pytest.raises(DataError, match="answer of 9 tokens; 1 to 7"):
        sample_rows([Sample((1,), tuple(range(9)), name="x")], (6, 8), 2, 1.0)


def test_schedule_visits_every_row_once_per_epoch_on_any_number_of_ranks():
    rows, settings = some_rows(12), replace(SETTINGS, steps=6)
    for world in (1, 2, 4):
        schedules = [Schedule(rows, settings, rank, world) for rank in range(world)]
        for epoch in (range(3), range(3, 6)):
            seen = [
                tuple(ids)
                for step in epoch
                for s in schedules
                for ids in s.batch(step).ids.tolist()
            ]
            assert len(set(seen)) == len(seen) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (16,)}, "lengths has 16; no slot is seen before token 19"),
        ({"steps": 0}, "steps is 0"),
        ({"next_token": 1.5}, "next_token is 1.5; it must be 0 to 1"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"loss": "mse"}, "mse"),
    ],
)
def test_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **changes)
