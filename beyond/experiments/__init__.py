"""Above all others: what the paper's figures and appendix measure beside narrations, a command each:
python -m beyond.experiments.NAME. (The tables: README.md and earlier.md, of the lines in results/.)"""
