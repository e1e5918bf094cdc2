"""The same numbers, faster; models on disk."""
