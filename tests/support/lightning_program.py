"""Stages of a recipe under Lightning, on as many ranks as asked: RECIPE OUT RANKS [STOP_AT]. Lightning starts it again
for every rank but the first.

Writes OUT.json with the losses of all steps of each stage, and OUT.npy with the weights at the end. STOP_AT: the first
stage is left after that many steps, and continues from Lightning's checkpoint in a new Trainer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from ups.config.recipe import resolve
from ups.integrations.lightning import TRAINER, StageData, StageModule
from ups.run.assemble import open_data


class Losses(Callback):
    """Remembers what was logged."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(trainer.callback_metrics["train/loss"]))


def main() -> None:
    recipe = resolve(sys.argv[1]).recipe
    out, ranks, stop_at = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0
    common: dict[str, Any] = dict(
        TRAINER,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision={"float64": "64-true", "float32": "32-true"}[recipe.engine.precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    losses, module = [], None
    with open_data(recipe) as opened:
        for index in range(len(recipe.stages)):
            watch = Losses()
            module = StageModule(recipe, opened, index, before=module)
            data = StageData(recipe, opened, module)
            if stop_at and index == 0:
                trainer = Trainer(max_steps=stop_at, callbacks=[watch], **common)
                trainer.fit(module, data)
                checkpoint = out.with_suffix(".ckpt")
                trainer.save_checkpoint(checkpoint)
                module = StageModule(recipe, opened, index)
                data = StageData(recipe, opened, module)
                trainer = Trainer(max_steps=module.num_steps, callbacks=[watch], **common)
                trainer.fit(module, data, ckpt_path=str(checkpoint), weights_only=True)
            else:
                trainer = Trainer(max_steps=module.num_steps, callbacks=[watch], **common)
                trainer.fit(module, data)
            losses.append(watch.seen)
    assert module is not None
    if trainer.is_global_zero:
        parts = [p.detach().flatten().double() for _, p in sorted(module.stage.named_parameters())]
        np.save(out.with_suffix(".npy"), torch.cat(parts).numpy())
        out.with_suffix(".json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
