"""Measurements behind what the README says of speed and memory."""
