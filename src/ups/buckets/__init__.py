"""Buckets of object stores: how one is opened, and the copy of a run in one."""
