"""The embedded default: a miniature world, the training stages of its small models, and a trained narrator."""
