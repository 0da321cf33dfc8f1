"""Universal Physics Stack: one neural simulator for many PDEs. No side effect and no heavy import here."""

__version__ = "0.1.0"
