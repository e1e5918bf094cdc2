"""Lets the tests import the files of the repository root."""
