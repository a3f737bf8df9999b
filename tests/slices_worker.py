"""Started by torchrun: as ``pipeline_worker``, for programs in slices of the sequence."""

from __future__ import annotations

import pipeline_worker
from sliced import model_and_batch

if __name__ == "__main__":
    pipeline_worker.main(model_and_batch)
