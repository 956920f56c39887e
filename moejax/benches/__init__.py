"""What `python -m moejax.bench` measures, one module each: `add_arguments(parser)` and `run(arguments)`."""
