"""The benchmarks of `python -m moejax.bench`, one module each; `moejax/bench.py` says what a module holds."""
