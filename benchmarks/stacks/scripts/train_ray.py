"""Ray Train: a TorchTrainer with a failure policy, which reports a checkpoint for each epoch."""

import os
import sys
import tempfile

import ray
import ray.train
import torch
import workload
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader


def train(config):
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    network = workload.Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "checkpoint.pt"))
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
        print(f"resuming at epoch {first}", flush=True)
    model = prepare_model(network)
    loader = DataLoader(
        workload.Waves(config["data"]), workload.BATCH, shuffle=True, num_workers=1, persistent_workers=True
    )
    loader = prepare_data_loader(loader)
    for epoch in range(first, workload.EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(folder, "checkpoint.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch}, checkpoint=checkpoint)
    if rank == 0:
        workload.write_final(network.state_dict())


def main(data: str, out: str, timeout_seconds: float) -> None:
    timeout = {"timeout_s": int(timeout_seconds)} if timeout_seconds else {}
    # Loopback only, and no dashboard.
    ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", num_cpus=4, object_store_memory=100 << 20)
    result = TorchTrainer(
        train,
        train_loop_config={"data": data},
        torch_config=TorchConfig(backend="gloo", **timeout),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=out,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
        ),
    ).fit()
    print(f"finished: {result.metrics}, error {result.error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
