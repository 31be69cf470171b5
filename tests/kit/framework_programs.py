"""Small trainings under the frameworks around torch; each prints what a run's tables must say of it."""

HUGGING_FACE = """
import json, os, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments, default_data_collator

RANK = int(os.environ["RANK"])
WINDOW = 2  # micro-batches a step

class Rows(Dataset):
    def __init__(self, first, n):
        self.first, self.n = first, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.first + i)
        x = torch.randn(6, generator=g)
        return {"x": x, "labels": x[:2].sum(), "id": torch.tensor(i)}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.seen, self.losses = [], []

    def forward(self, x, labels=None, id=None):
        if self.training and id is not None:
            self.seen.append(id.tolist())
        out = self.layers(x).squeeze(-1)
        loss = torch.nn.functional.mse_loss(out, labels)
        if self.training:
            self.losses.append(loss.item() / WINDOW)
        return {"loss": loss, "logits": out}

def trainer():
    torch.manual_seed(1)
    net = Net()
    args = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=WINDOW,
        eval_strategy="epoch", save_strategy="epoch", logging_steps=1, learning_rate=1e-2, report_to="none",
        use_cpu=True, bf16=True, disable_tqdm=True, seed=3, remove_unused_columns=False, lr_scheduler_type="cosine",
    )
    hf = Trainer(model=net, args=args, train_dataset=Rows(0, 43), eval_dataset=Rows(1000, 12),
                 data_collator=default_data_collator)
    hf.train()
    log = [e["loss"] for e in hf.state.log_history if "loss" in e]
    return about(net, steps=hf.state.global_step, losses=net.losses, seen=net.seen, log=log)

def loop(dispatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state()
    window = 1 if dispatch else 3
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=window,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch or None),
    )
    torch.manual_seed(2)
    net = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net, optimizer, loader, scheduler, held = accelerator.prepare(
        net, optimizer, DataLoader(Rows(5000, 40), batch_size=4, shuffle=True), scheduler,
        DataLoader(Rows(9000, 10), batch_size=4),
    )
    steps, losses, seen = 0, [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(net):
                seen.append(batch["id"].tolist())
                loss = torch.nn.functional.mse_loss(net(batch["x"]).squeeze(-1), batch["labels"])
                accelerator.backward(loss)
                losses.append(loss.item() / window)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for batch in held:
                accelerator.gather_for_metrics(net(batch["x"]))
    return about(net, steps=steps, losses=losses, seen=seen, dispatched=dispatch)

def about(net, **more):
    return more | {"rank": RANK, "weights": sum(p.double().sum().item() for p in net.parameters())}

for name, value in (("trainer", trainer()), ("loop", loop(False)), ("dispatched", loop(True))):
    os.write(1, (json.dumps({name: value}) + "\\n").encode())
dist.destroy_process_group()
"""

LIGHTNING = """
import json, logging, os, warnings
warnings.filterwarnings("ignore")
import torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader, Dataset, IterableDataset

RANK = int(os.environ["RANK"])
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

class Rows(Dataset):
    def __init__(self, first, n):
        self.first, self.n = first, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(self.first + i))
        return x, x[:2].sum(), torch.tensor(i)

class Net(pl.LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.automatic_optimization = not manual
        nn = torch.nn
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.seen, self.losses = [], []

    def training_step(self, batch, index):
        x, y, ids = batch
        self.seen.append(ids.tolist())
        loss = torch.nn.functional.mse_loss(self.layers(x).squeeze(-1), y)
        self.losses.append(loss.item() / (2 if self.automatic_optimization else 1))
        self.log("train_loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch, index):
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch[0]).squeeze(-1), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]

def fit(manual):
    pl.seed_everything(5, verbose=False)
    net = Net(manual)
    more = {} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "precision": "bf16-mixed"}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **more)
    trainer.fit(net, DataLoader(Rows(0, 43), batch_size=4, shuffle=True), DataLoader(Rows(1000, 12), batch_size=4))
    return {"rank": RANK, "steps": trainer.global_step, "losses": net.losses, "seen": net.seen,
            "weights": sum(p.double().sum().item() for p in net.parameters())}

found = {"automatic": fit(False), "manual": fit(True)}
for name, value in found.items():
    os.write(1, (json.dumps({name: value}) + "\\n").encode())
"""

OWN = """
import json, os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

class Text(IterableDataset):
    \"\"\"Packed tokens, split by rank, with a state: as the pre-training stacks write them.\"\"\"

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            g = torch.Generator().manual_seed(self.at * WORLD + RANK)
            self.at += 1
            tokens = torch.randint(0, 50, (17,), generator=g)
            yield {"input": tokens[:-1], "label": tokens[1:]}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

def titan():
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (WORLD,))
    nn = torch.nn
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 50))
    fully_shard(net[1], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
    loader = StatefulDataLoader(Text(), batch_size=4)
    losses = []
    data = iter(loader)
    for _ in range(12):
        optimizer.zero_grad()
        for _ in range(2):
            batch = next(data)
            loss = torch.nn.functional.cross_entropy(net(batch["input"]).flatten(0, 1), batch["label"].flatten()) / 2
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return {"rank": RANK, "steps": 12, "losses": losses, "seen": [],
            "weights": sum(p.to_local().double().sum().item() for p in net.parameters())}

class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x[:2].sum(), i

class Wrapped:
    \"\"\"An optimizer of the engine's own that is no torch optimizer.\"\"\"

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= WORLD
        self.inner.step()
        self.inner.zero_grad()

class Engine(torch.nn.Module):
    \"\"\"forward, backward and step through one object, which accumulates by itself.\"\"\"

    def __init__(self, net, optimizer, window):
        super().__init__()
        self.module, self.optimizer, self.window, self.micro, self.steps = net, Wrapped(optimizer), window, 0, 0

    def forward(self, x):
        return self.module(x)

    def backward(self, loss):
        (loss / self.window).backward()
        self.micro += 1

    def step(self):
        if self.micro % self.window == 0:
            self.optimizer.step()
            self.steps += 1

def engine():
    torch.manual_seed(4)
    net = torch.nn.Linear(6, 1)
    engine = Engine(net, torch.optim.Adam(net.parameters(), lr=1e-2), 2)
    sampler = torch.utils.data.DistributedSampler(Rows(), seed=1)
    losses, seen = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y, ids in DataLoader(Rows(), batch_size=4, sampler=sampler):
            seen.append(ids.tolist())
            loss = torch.nn.functional.mse_loss(engine(x).squeeze(-1), y)
            engine.backward(loss)
            losses.append(loss.item() / 2)
            engine.step()
    return {"rank": RANK, "steps": engine.steps, "losses": losses, "seen": seen,
            "weights": sum(p.double().sum().item() for p in net.parameters())}

dist.init_process_group("gloo")
found = {"titan": titan(), "engine": engine()}
for name, value in found.items():
    os.write(1, (json.dumps({name: value}) + "\\n").encode())
dist.destroy_process_group()
"""
