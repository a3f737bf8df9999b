"""Optimizers of parallel models: AdamW on shards, clipping, loss scaling, dropout steps."""
