"""The only room that knows about ranks, devices and process groups."""
