"""Prepared data on disk."""
