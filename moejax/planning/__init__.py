"""Know before you rent: what a step needs and how long it takes, from formulas or from the compiled program."""
