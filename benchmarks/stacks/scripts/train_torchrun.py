"""torchrun and DDP, as in the tutorial on fault-tolerant training: a snapshot for each epoch, read at the start."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import workload
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@record
def main(data: str, out: str, timeout_seconds: float) -> None:
    torch.manual_seed(0)
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else None
    dist.init_process_group("gloo", timeout=timeout)
    rank = int(os.environ["RANK"])
    network = workload.Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    snapshot, first = os.path.join(out, "snapshot.pt"), 0
    if os.path.exists(snapshot):
        state = torch.load(snapshot)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epochs_run"]
        print(f"resuming from snapshot at epoch {first}", flush=True)
    model = DistributedDataParallel(network)
    waves = workload.Waves(data)
    sampler = DistributedSampler(waves)
    loader = DataLoader(waves, workload.BATCH, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(first, workload.EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            state = {
                "model": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs_run": epoch + 1,
            }
            torch.save(state, snapshot)
            print(f"epoch {epoch} done", flush=True)
    if rank == 0:
        workload.write_final(network.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
