"""A training in real life: several processes, states from which it goes on, late and later starts."""
