"""Below all others: what any such project needs and the paper does not mention. Imports nothing from outside itself."""
