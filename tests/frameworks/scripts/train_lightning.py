"""A script with Lightning's Trainer: what it trains, what it logs and which hooks it has called go to a file for each rank.

``train_lightning.py FOLDER KIND KILL ARGUMENTS``. KIND: ``stock``, ``elastic`` or ``framework``. KILL: ``STEP:RANK:SIGNAL:WHERE`` (``RAISE``: an exception; ``ALL``: all ranks), several with
commas, each once for the job; "": nobody. ARGUMENTS: of Trainer, as JSON, and ``module``, ``checkpoint``, ``stop``, ``callbacks``, ``package``, ``samples``: of this script.
"""

import hashlib
import importlib
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

folder, kind, kill, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
options = {
    name: arguments.pop(name, None)
    for name in ("module", "checkpoint", "stop", "callbacks", "package", "samples", "validate_first")
}
strategy = "ddp"
pl = importlib.import_module(options["package"] or "lightning.pytorch")
if kind == "elastic":
    from rackrun.lightning import Elastic

    strategy = Elastic()
warnings.filterwarnings("ignore")
logging.getLogger(pl.__name__).setLevel(logging.ERROR)


class Data(Dataset):
    def __init__(self, samples, first=0):
        self.samples, self.first = samples, first

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(self.first + index))
        return x, x.sum().reshape(1).sin()


def strike(where, step):
    for number, one in enumerate(filter(None, kill.split(","))):
        at, rank, name, place = one.split(":")
        struck = folder / f"struck{number or ''}"
        if (place, int(at), int(rank)) == (where, step, torch.distributed.get_rank()) and not struck.exists():
            struck.touch()
            if name == "RAISE":
                raise RuntimeError("once")
            if name == "ALL":
                others = [int(path.name.removeprefix("process-")) for path in folder.glob("process-*")]
                for process in set(others) - {os.getpid()}:
                    os.kill(process, signal.SIGKILL)
                name = "KILL"
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


class Calls(pl.Callback):
    """Counts hooks, and keeps what those around a batch were given."""

    def __init__(self):
        self.calls, self.given = {}, {}

    def count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_train_start(self, trainer, module):
        self.count("train_start")

    def on_train_epoch_start(self, trainer, module):
        self.count("epoch_start")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.count("batch_start")
        strike("begin", trainer.global_step)
        self.given[f"start {trainer.current_epoch} {batch_idx}"] = [x.tolist() for x in batch]

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.count("zero_grad")

    def on_before_backward(self, trainer, module, loss):
        self.count("before_backward")

    def on_after_backward(self, trainer, module):
        self.count("after_backward")
        strike("backward", trainer.global_step)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.count("optimizer_step")
        strike("update", trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count("batch_end")
        shown = {k: v for k, v in sorted(trainer.callback_metrics.items()) if k.startswith("train")}
        given = [plain(outputs), [x.tolist() for x in batch], plain(shown), trainer.global_step]
        self.given[f"end {trainer.current_epoch} {batch_idx}"] = given
        strike("end", trainer.global_step)

    def on_train_epoch_end(self, trainer, module):
        self.count("epoch_end")
        strike("epoch", trainer.global_step)

    def on_validation_epoch_end(self, trainer, module):
        self.count("validation_end")

    def on_sanity_check_end(self, trainer, module):
        self.count("sanity_check_end")
        strike("sanity", trainer.global_step)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.count("save")
        strike("save", trainer.global_step)

    def on_train_end(self, trainer, module):
        self.count("train_end")


class Module(pl.LightningModule):
    def __init__(self, how):
        super().__init__()
        self.save_hyperparameters(how)
        self.how = how
        self.losses, self.updates = [], {"done": 0}
        self.outputs = []
        torch.manual_seed(0)
        norm = [torch.nn.BatchNorm1d(16)] if how.get("norm") else []
        drop = [torch.nn.Dropout(0.5)] if how.get("dropout") else []
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), *norm, torch.nn.Tanh(), *drop, torch.nn.Linear(16, 1))
        if how.get("metric"):
            import torchmetrics

            self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        strike("forward", self.global_step)
        x, y = batch
        found = self.net(x)
        loss = ((found - y) ** 2).mean()
        self.losses.append(loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.how.get("metric"):
            self.error(found.detach(), y)
            self.log("train_error", self.error, on_step=False, on_epoch=True)
        return {"loss": loss, "seen": y.sum()}

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())

    def on_train_epoch_end(self):
        self.log("losses_mean", torch.stack(self.losses).mean(), sync_dist=True)
        self.log("losses_seen", float(len(self.losses)))
        self.losses.clear()

    def validation_step(self, batch, batch_idx):
        strike("validation", self.global_step)
        x, y = batch
        own = self.how.get("own_metric")
        loss = (
            torch.tensor(float(self.global_step * (2 * self.global_rank - 1)))
            if own
            else ((self.net(x) - y) ** 2).mean()
        )
        self.log("val_loss", loss, sync_dist=not own)
        self.outputs.append(self.net(x).mean())

    def on_validation_epoch_end(self):
        self.log("outputs_mean", torch.stack(self.outputs).mean(), sync_dist=True)
        self.log("outputs_seen", float(len(self.outputs)))
        self.outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        kind = self.how.get("scheduler")
        if kind == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        if kind is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **kind}}


class CountsUpdates(Module):
    """Its code goes on after the optimizer's update."""

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        strike("updated", self.global_step)
        self.updates["done"] += 1
        self.log("weight_norm", self.net[0].weight.detach().norm())
        self.log("updates", float(self.updates["done"]), on_epoch=True)


class DataModule(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Data(options["samples"] or 21), batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Data(5, 1000), batch_size=2)


if __name__ == "__main__":
    (folder / f"process-{os.getpid()}").touch()
    callbacks = [calls := Calls(), pl.callbacks.LearningRateMonitor("step")]
    if options["checkpoint"] is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(**options["checkpoint"]))
    if options["stop"] is not None:
        callbacks.append(pl.callbacks.EarlyStopping(**options["stop"]))
    callbacks += [getattr(pl.callbacks, name)(**given) for name, given in (options["callbacks"] or {}).items()]
    how = options["module"] or {}
    module = (CountsUpdates if how.get("counts_updates") else Module)(how)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        logger=pl.loggers.CSVLogger(folder, name="logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        enable_checkpointing=options["checkpoint"] is not None,
        **arguments,
    )
    if options["validate_first"]:
        trainer.validate(module, datamodule=DataModule(), verbose=False)
    trainer.fit(module, datamodule=DataModule())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    saved, logs = {}, Path(trainer.logger.log_dir)
    for path in sorted(logs.rglob("*.ckpt")) if rank == 0 else ():
        state = torch.load(path, weights_only=False)["state_dict"]
        kept = torch.cat([value.float().flatten() for value in state.values()])
        saved[str(path.relative_to(logs))] = hashlib.sha256(kept.numpy().tobytes()).hexdigest()
    best = trainer.checkpoint_callback
    found = {
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "position": [trainer.global_step, trainer.current_epoch, trainer.should_stop],
        "metrics": {k: v.item() for k, v in sorted(trainer.callback_metrics.items())},
        "history": (logs / "metrics.csv").read_text() if rank == 0 else "",
        "hparams": (logs / "hparams.yaml").read_text() if rank == 0 else "",
        "saved": saved,
        "best": [str(best.best_model_path).removeprefix(str(logs)), plain(best.best_model_score)] if best else [],
        "own": [module.updates, len(module.losses)],
        "calls": calls.calls,
        "given": calls.given,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
