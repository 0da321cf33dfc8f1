"""The same run elsewhere: scripts for schedulers, and rented machines that are gone afterwards. No torch."""
