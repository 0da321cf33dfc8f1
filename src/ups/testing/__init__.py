"""For tests of plugins: `ranks` runs a check on real ranks, `tracked_run` a run without training for a tracker."""
