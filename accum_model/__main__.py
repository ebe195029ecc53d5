"""Runs the demo: `python -m accum_model`."""

import sys

from accum_model import demo

if __name__ == "__main__":
    sys.exit(demo.main())
