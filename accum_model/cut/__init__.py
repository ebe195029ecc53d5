"""Batches cut into micro-batches inside one training step."""
