"""What the tensors of a stepper are called, and what they were called when a stepper had a single network.

Checkpoints and bundles of that time are read under the names of today.
"""

from __future__ import annotations

import re

# In front of a name: the kind of entry of a checkpoint, and the stepper inside a stage.
_WHERE = r"^((?:[a-z]+/)?(?:stepper\.)?)"
_PRESENT = re.compile(_WHERE + r"networks\.operator\.")
_FORMER = re.compile(_WHERE + r"network\.")


def former_name(name: str) -> str:
    """The name that a tensor of today had; the same if it had no other."""
    return _PRESENT.sub(r"\1network.", name)


def present_name(name: str) -> str:
    """The name that a stored tensor has today; the same if it was never called otherwise."""
    return _FORMER.sub(r"\1networks.operator.", name)
