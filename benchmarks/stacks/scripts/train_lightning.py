"""Lightning Trainer: a checkpoint for each epoch and on exceptions, `ckpt_path="last"`; torchrun restarts it."""

import sys
from datetime import timedelta

import torch
import workload
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = workload.Network()

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(data: str, out: str, timeout_seconds: float) -> None:
    seed_everything(0)
    timeout = {"timeout": timedelta(seconds=timeout_seconds)} if timeout_seconds else {}
    loader = DataLoader(workload.Waves(data), workload.BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", **timeout),
        max_epochs=workload.EPOCHS,
        default_root_dir=out,
        callbacks=[
            ModelCheckpoint(dirpath=f"{out}/checkpoints", every_n_epochs=1, save_last=True, save_on_exception=True)
        ],
        logger=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, loader, ckpt_path="last")
    if trainer.is_global_zero:
        workload.write_final(module.network.state_dict())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
