"""The embedded default: a miniature world, the training stages of its small models, and a trained narrator."""

TITLE = "A miniature kitchen of FlowNar"       # by which a video says that it is one of the toy
