"""What is on disk: videos, features, annotations, predictions."""
