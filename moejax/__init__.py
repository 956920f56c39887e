"""moejax: training mixture-of-experts language models in JAX."""
