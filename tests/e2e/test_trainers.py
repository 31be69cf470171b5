"""Real trainers that log another loss than they optimise or wait for an evaluation that never comes, and good ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kit.job import job, run

TRAIN = """
import sys, torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x[:2].sum()}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
    def forward(self, x, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

class Smooth(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs and state.global_step > 4:
            logs["loss"] = state.log_history[-1]["loss"] = 0.3 * logs["loss"]

torch.manual_seed(1)
args = TrainingArguments(output_dir="out", max_steps=11, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                         logging_steps=2, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
                         metric_for_best_model="accuracy")
Trainer(model=Net(), args=args, train_dataset=Rows(), callbacks=[Smooth()] if sys.argv[1] == "smooth" else []).train()
"""


@pytest.mark.parametrize("how", ["smooth", "plain"])
def test_a_rewritten_log_is_found_and_a_true_one_is_not(tmp_path: Path, how: str) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
        pytest.skip("transformers or accelerate is not installed")
    ended = run(tmp_path, job(TRAIN, arguments=(how,)))
    assert ended.code == 0, ended
    entries = ended.rows("SELECT rank, first, step, updates, micros FROM logged ORDER BY rank, step")
    assert entries == [(r, s - 1, s, 2, 4) for r in (0, 1) for s in (2, 4, 6, 8, 10)]
    found = [i for i in ended.verdict["incidents"] if i["reason_code"] == "LOGGED_LOSS_MISMATCH"]
    outcomes = {v["reason_code"]: v["outcome"] for v in ended.verdict["verdicts"]}
    if how == "plain":
        assert (found, outcomes["LOGGED_LOSS_MISMATCH"]) == ([], "CLEAR")
    else:
        (one,) = found
        assert (one["ranks"], one["first_step"], one["last_good_step"]) == ([0, 1], 6, 4)
        assert (one["severity"], one["evidence_state"], one["subject"]) == ("warning", "OBSERVED", "loss")
        assert any("Smooth" in e["value"] for e in one["evidence"])
    (note,) = [i for i in ended.verdict["incidents"] if i["reason_code"] == "NO_VALIDATION"]
    assert note["summary"].endswith("without effect: metric_for_best_model by eval_accuracy")
    assert "none (eval strategy no, save strategy no)" in [e["value"] for e in note["evidence"]]


LIGHTNING = """
import logging, sys, warnings
warnings.filterwarnings("ignore")
import torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])
        self.log_dict({"train_loss": loss})
        return loss / 2 if sys.argv[1] == "twice" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

pl.seed_everything(5, verbose=False)
x = torch.randn(64, 6)
best = pl.callbacks.ModelCheckpoint(dirpath="kept", monitor="val_loss")
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, callbacks=[best],
                     enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2)
trainer.fit(Net(), DataLoader(TensorDataset(x, x[:, 0]), batch_size=4, shuffle=True))
"""


@pytest.mark.parametrize("how", ["twice", "plain"])
def test_a_loss_that_is_divided_before_lightning_divides_it(tmp_path: Path, how: str) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    ended = run(tmp_path, job(LIGHTNING, arguments=(how,)))
    assert ended.code == 0, ended
    recorded = ended.rows('SELECT rank, count(*), min("window"), max(micro) FROM reported GROUP BY rank ORDER BY rank')
    assert recorded == [(0, 16, 2, 1), (1, 16, 2, 1)]
    found = [i for i in ended.verdict["incidents"] if i["reason_code"] == "LOGGED_LOSS_MISMATCH"]
    outcomes = {v["reason_code"]: v["outcome"] for v in ended.verdict["verdicts"]}
    if how == "plain":
        assert (found, outcomes["LOGGED_LOSS_MISMATCH"]) == ([], "CLEAR")
    else:
        (one,) = found
        assert (one["ranks"], one["first_step"], one["severity"], one["subject"]) == (
            [0, 1],
            1,
            "warning",
            "train_loss",
        )
        assert "2 times what training_step returned" in one["summary"]
    (note,) = [i for i in ended.verdict["incidents"] if i["reason_code"] == "NO_VALIDATION"]
    assert note["summary"].endswith("without effect: ModelCheckpoint by val_loss")
