"""Bytes to windows: no threads, no devices, no torch.distributed."""
