"""The only module that knows about ranks, devices and process groups."""
