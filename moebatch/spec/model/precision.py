"""What `moebatch pack` writes; commands start without what reads it."""

from typing import Literal

Precision = Literal["int4", "int8", "fp8"]
"""What experts become."""
GROUPS = (64, 32)
"""Columns of a group of int4 codes, the preferred ones first."""
