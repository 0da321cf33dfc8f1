"""The same run elsewhere: scripts for schedulers that start `ups train` there. No torch."""
