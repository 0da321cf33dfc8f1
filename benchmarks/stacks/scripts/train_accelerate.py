"""Accelerate: prepared objects, automatic checkpoint naming, `load_state()` of the newest; its launcher restarts it."""

import os
import sys
from datetime import timedelta

import torch
import workload
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader


def main(data: str, out: str, timeout_seconds: float) -> None:
    kwargs = {"timeout": timedelta(seconds=timeout_seconds)} if timeout_seconds else {}
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(out, automatic_checkpoint_naming=True, total_limit=3),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", **kwargs)],
    )
    set_seed(0)
    network = workload.Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(workload.Waves(data), workload.BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    first = 0
    if os.path.isdir(f"{out}/checkpoints") and os.listdir(f"{out}/checkpoints"):
        accelerator.load_state()  # the newest
        first = accelerator.save_iteration = 1 + max(
            int(name.rsplit("_", 1)[1]) for name in os.listdir(f"{out}/checkpoints")
        )
        accelerator.print(f"resuming at epoch {first}")
    for epoch in range(first, workload.EPOCHS):
        loader.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state()
        accelerator.print(f"epoch {epoch} done")
    if accelerator.is_main_process:
        workload.write_final(accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
