"""Using a trained simulator: bundles, rollouts, queries. Neither training code nor torch.distributed."""
