"""The checks of `ups doctor`, each a program; started by `ups.doctor.examine`, never imported by it."""
