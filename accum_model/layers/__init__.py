"""Layers that know of accumulation."""
