"""The truth about a rule; its core serves users as well, see `autoshard.verify.rule_check`."""

from __future__ import annotations

from autoshard.verify.rule_check import (
    Call,
    Sample,
    WrongRule,
    check,
    digits_of,
    make_call,
    recombine,
    type_of,
)

__all__ = ["Call", "Sample", "WrongRule", "check", "digits_of", "make_call", "recombine", "type_of"]
