"""The version, apart so that packaging reads it without TensorFlow."""

__version__ = "0.1.0"
