"""Long Range Arena harness: run, measure, compare."""

__version__ = "0.1.0"
