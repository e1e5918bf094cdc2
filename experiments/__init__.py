"""Above all others: tables and figures of the paper (§4, App. C), a command each:
python -m experiments.NAME."""
