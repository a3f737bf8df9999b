"""What may live in host memory between its uses: activations, parameters, or the state of the optimizer.

Ren et al., ZeRO-Offload (ATC 2021): optimizer state and its step on the host. Rajbhandari et al.,
ZeRO-Infinity (SC 2021): parameters and activations there as well, fetched one layer ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autoshard.errors import UsageError, nearest

STORE = "host.store.default"
LOAD = "host.load.default"
#: ops that move values between a device and the memory of its host: ``outs = op((a, b, ...))``, each out a
#: value of the same type and layout as what it is made of
HOST_OPS = (STORE, LOAD)


@dataclass(frozen=True)
class Offload:
    """What is wanted in host memory.

    activations: what forward keeps for backward. parameters: the rank's shards, with their gradients and what
    the optimizer keeps. optimizer: what the optimizer keeps, parameters and gradients staying on the device.
    """

    activations: bool = False
    parameters: bool = False
    optimizer: bool = False

    @classmethod
    def parse(cls, text: str) -> Offload:
        """``"activations,optimizer"``, in any order; "" or "none" for nothing. Raises UsageError for another
        word."""
        known = [f.name for f in fields(cls)]
        words = [word.strip() for word in text.split(",") if word.strip()] if text.strip() != "none" else []
        for word in words:
            if word not in known:
                raise UsageError(
                    f"{word!r} is nothing that can be offloaded to host memory",
                    where=f"offload {text!r}",
                    hint=f"{nearest(word, known)}, or several of them with commas between",
                )
        return cls(**dict.fromkeys(words, True))

    def __str__(self) -> str:
        return ",".join(f.name for f in fields(self) if getattr(self, f.name))

    def __bool__(self) -> bool:
        return self.activations or self.parameters or self.optimizer

    @property
    def states(self) -> bool:
        """Whether the state of the optimizer lives in host memory."""
        return self.optimizer or self.parameters


#: nothing is offloaded
NO_OFFLOAD = Offload()
