"""`ups serve`: simulators over HTTP, and the client of such a server."""
